"""Which chunks a prefix is made of, and which of them a next token reads, over all KV groups."""

from collections.abc import Callable, Iterator, Sequence

from starling_engine.kv.events import BlockSpan
from starling_engine.kv.manager import KVManager, SequenceBlocks, agreed_length
from starling_engine.kv_offload.primary import Chunk
from starling_engine.kv_offload.secondary.base import CHUNK


class ChunkMap:
    """Arithmetic over the groups of one KVManager. `first` is the chunk in which what the device has ends."""

    def __init__(self, kv: KVManager) -> None:
        self.blocks = CHUNK // kv.block_size
        """Blocks of a chunk."""
        self.groups = range(len(kv.groups))
        self._kv = kv
        self._specs = [group.spec for group in kv.groups]

    def names(self, holding: SequenceBlocks, tokens: Sequence[int]) -> list[bytes]:
        """Of the chunks that end before the last token."""
        holding.chain.extend(tokens, len(tokens))
        return holding.chain.names[self.blocks - 1 : (len(tokens) - 1) // CHUNK * self.blocks : self.blocks]

    def span(self, holding: SequenceBlocks, tokens: Sequence[int], at: int) -> BlockSpan:
        """The blocks of the chunk at this place of the prefix."""
        return self._kv.span(holding, tokens, at * self.blocks, self.blocks)

    def on_device(self, holding: SequenceBlocks, tokens: Sequence[int]) -> int:
        """Chunks of the prefix that the device has whole."""
        return len(self._kv.find_prefix(holding, tokens)[0]) // self.blocks

    def longest(self, names: list[bytes], first: int, has: Callable[[Chunk], bool]) -> int:
        """The most chunks of a prefix, of which the device has the first ones, that all groups have, as far as they need them."""
        return agreed_length(self.groups, len(names), lambda group, limit: self._group_length(group, names, first, limit, has))

    def _group_length(self, group: int, names: list[bytes], first: int, limit: int, has: Callable[[Chunk], bool]) -> int:
        while limit > first:
            begin = max(first, self._first_needed(group, limit))
            missing = next((at for at in range(begin, limit) if not has((group, names[at]))), None)
            if missing is None:
                return limit
            limit = missing
        return min(first, limit)

    def needed(self, names: list[bytes], first: int, count: int) -> Iterator[tuple[Chunk, int]]:
        """Of `count` chunks, those that a next token reads and the device does not have, with their place in the prefix."""
        for group in self.groups:
            for at in range(max(first, self._first_needed(group, count)), count):
                yield (group, names[at]), at

    def _first_needed(self, group: int, count: int) -> int:
        """The first chunk that a token after `count` chunks reads."""
        return self._specs[group].first_needed_block(count * CHUNK) // self.blocks
