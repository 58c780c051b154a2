"""Names for cached blocks: a chain of SHA-256 over granules of eight tokens.

A block's name is the chain's value at its end, so it stands for the whole prefix, and blocks of 8, 16 and 32 tokens draw on one
chain. SHA-256 makes a hit proof enough: nobody can make another prefix with the same name.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256

GRANULE = 8


def chain_root(*keys: str | None) -> bytes:
    """The chain's first value: what makes a prefix valid besides its tokens (adapter, cache salt)."""
    return sha256(repr(keys).encode()).digest()


class HashChain:
    """The chain over one growing token sequence. Media hashes are part of the root, as their tokens are placeholders."""

    __slots__ = ("_at", "_head", "_stride", "names")

    def __init__(self, root: bytes, block_size: int) -> None:
        self._head = root
        self._stride = block_size // GRANULE
        self._at = 0
        self.names: list[bytes] = []
        """names[i] is the name of logical block i, for every block that has been full at `extend`."""

    @property
    def length(self) -> int:
        """Tokens of the named blocks."""
        return self._at

    def covers(self, count: int) -> bool:
        """Whether the blocks that are full within `count` tokens have names."""
        return count - self._at < self._stride * GRANULE

    def extend(self, tokens: Sequence[int], count: int) -> None:
        """Names the blocks that are full within the first `count` tokens."""
        packed = array("I", tokens[self._at : count - count % (self._stride * GRANULE)]).tobytes()
        head, width = self._head, 4 * GRANULE
        for number, start in enumerate(range(0, len(packed), width), 1):
            head = sha256(head + packed[start : start + width]).digest()
            if number % self._stride == 0:
                self.names.append(head)
        self._at += len(packed) // 4
        self._head = head
