"""The chunks of a prefix, and those of them that a next token reads, over all KV groups."""

from collections.abc import Callable, Iterator

from starling_engine.kv.events import BlockSpan
from starling_engine.kv.manager import KVManager, agreed_length
from starling_engine.kv_offload.secondary.base import CHUNK, Chunk
from starling_engine.request_state import RequestState


class ChunkMap:
    """Arithmetic over the KV groups of one KVManager. `first` is the number of chunks that the device has."""

    def __init__(self, kv: KVManager) -> None:
        self.blocks = CHUNK // kv.block_size
        """Blocks in a chunk."""
        self.groups = range(len(kv.groups))
        self._kv = kv
        self._specs = [group.spec for group in kv.groups]

    def hashes(self, request: RequestState) -> list[bytes]:
        """Returns the hash at the end of each chunk that ends before the last token."""
        chain, length = request.blocks.chain, len(request.tokens)
        chain.extend(request.tokens, length)
        return chain.hashes[self.blocks - 1 : (length - 1) // CHUNK * self.blocks : self.blocks]

    def span(self, request: RequestState, at: int) -> BlockSpan:
        """Returns the blocks of the prefix's chunk number `at`."""
        return self._kv.span(request.blocks, request.tokens, at * self.blocks, self.blocks)

    def on_device(self, request: RequestState) -> int:
        """Returns how many chunks of the prefix the device has whole."""
        return len(self._kv.find_prefix(request.blocks, request.tokens)[0]) // self.blocks

    def longest(self, hashes: list[bytes], first: int, has: Callable[[Chunk], bool]) -> int:
        """Returns the most chunks of a prefix that all groups have, as far as each needs them. The device has the first ones."""
        return agreed_length(self.groups, len(hashes), lambda group, limit: self._group_length(group, hashes, first, limit, has))

    def _group_length(self, group: int, hashes: list[bytes], first: int, limit: int, has: Callable[[Chunk], bool]) -> int:
        while limit > first:
            begin = max(first, self._first_needed(group, limit))
            missing = next((at for at in range(begin, limit) if not has((group, hashes[at]))), None)
            if missing is None:
                return limit
            limit = missing
        return min(first, limit)

    def needed(self, hashes: list[bytes], first: int, count: int) -> Iterator[tuple[Chunk, int]]:
        """Yields those of `count` chunks that a next token reads and the device lacks, with their index in the prefix."""
        for group in self.groups:
            for at in range(max(first, self._first_needed(group, count)), count):
                yield (group, hashes[at]), at

    def _first_needed(self, group: int, count: int) -> int:
        """Returns the first chunk that a token after `count` chunks reads."""
        return self._specs[group].first_needed_block(count * CHUNK) // self.blocks
