"""The chunks of a prefix, and those of them that a next token reads, over all KV groups.

A snapshot of a recurrent state is several chunks, too, its pieces: each has as many of its blocks as a chunk has. They are groups
behind the KV groups, and have the name of the prefix that they are the state of. All of them are read, or none.
"""

from collections.abc import Callable, Iterable, Iterator

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
        self.pieces = range(len(kv.groups), len(kv.groups) + -(-kv.state_blocks // self.blocks))
        """Groups that the pieces of a snapshot are; none without a recurrent state."""
        self._kv = kv
        self._specs = [group.spec for group in kv.groups]

    def hashes(self, request: RequestState) -> list[bytes]:
        """Returns the hash at the end of each chunk that ends before the last token."""
        chain, length = request.blocks.chain, len(request.tokens)
        chain.extend(request.tokens, length)
        return chain.hashes[self.blocks - 1 : (length - 1) // CHUNK * self.blocks : self.blocks]

    def span(self, request: RequestState, at: int) -> BlockSpan:
        """Returns the blocks of the prefix's chunk number `at`. Pieces of a snapshot at its end have the same."""
        return self._kv.span(request.blocks, request.tokens, at * self.blocks, self.blocks)

    def found_blocks(self, chunk: Chunk, span: BlockSpan) -> list[int]:
        """Returns the chunk's blocks on the device; none unless all are there."""
        group, name = chunk
        if group in self.pieces:
            return self.piece(group, self._kv.find_snapshot(name) or [])
        found = [self._kv.pool.find(group, each) for each in span.hashes]
        return [block for block in found if block is not None] if None not in found else []

    def piece(self, group: int, blocks: list[int]) -> list[int]:
        """Returns those of a state's blocks that the piece has."""
        first = (group - self.pieces.start) * self.blocks
        return blocks[first : first + self.blocks]

    def snapshot(self, name: bytes) -> list[Chunk]:
        """Returns the pieces of the snapshot behind a prefix."""
        return [(group, name) for group in self.pieces]

    def follows(self, chunk: Chunk, other: Chunk) -> bool:
        """Returns whether `other` is a later piece of the snapshot of which `chunk` is one."""
        return chunk[0] in self.pieces and other[0] > chunk[0] and other[1] == chunk[1]

    def wanted(self, hashes: Iterable[bytes]) -> list[Chunk]:
        """Returns what is to be looked up of a part of a prefix. The first piece of a snapshot stands for all of them."""
        groups = (*self.groups, *self.pieces[:1])
        return [(group, name) for name in hashes for group in groups]

    def looked_up_as(self, chunk: Chunk) -> Chunk:
        """Returns the chunk by which `chunk` is looked up."""
        return (self.pieces.start, chunk[1]) if chunk[0] in self.pieces else chunk

    def looked_up_by(self, chunk: Chunk) -> list[Chunk]:
        """Returns the chunks for which `chunk` is looked up."""
        return self.snapshot(chunk[1]) if chunk[0] in self.pieces else [chunk]

    def has_all(self, hashes: list[bytes], first: int, has: Callable[[Chunk], bool]) -> bool:
        """Returns whether nothing is missing behind the `first` chunks: of snapshots, the last one suffices."""
        if first >= len(hashes):
            return True
        chunks = [(group, name) for name in hashes[first:] for group in self.groups]
        return all(map(has, chunks)) and all(map(has, self.snapshot(hashes[-1])))

    def on_device(self, request: RequestState) -> int:
        """Returns how many chunks of the prefix the device has whole."""
        return self._kv.find_prefix(request.blocks, request.tokens).length // self.blocks

    def longest(self, hashes: list[bytes], first: int, has: Callable[[Chunk], bool]) -> int:
        """Returns the most chunks of a prefix that all groups have, as far as each needs them. The device has the first ones."""
        groups = (*self.groups, *self.pieces[:1])  # the first piece is asked for all of them
        return agreed_length(groups, len(hashes), lambda group, limit: self._group_length(group, hashes, first, limit, has))

    def _group_length(self, group: int, hashes: list[bytes], first: int, limit: int, has: Callable[[Chunk], bool]) -> int:
        if group in self.pieces:
            ends = (count for count in range(limit, first, -1) if all(map(has, self.snapshot(hashes[count - 1]))))
            return next(ends, min(first, limit))
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
        if count > first:
            yield from ((piece, count - 1) for piece in self.snapshot(hashes[count - 1]))

    def _first_needed(self, group: int, count: int) -> int:
        """Returns the first chunk that a token after `count` chunks reads."""
        return self._specs[group].first_needed_block(count * CHUNK) // self.blocks
