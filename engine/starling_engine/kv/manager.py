"""Manages the blocks of sequences: block tables of all KV groups, prefix hits, forks, windows, and reservations.

A sequence is admitted only when the pool can hold all of its known tokens. Blocks that it has not taken yet are reserved, so two
half-prefilled prompts never wait for each other. Only growth by new output tokens can run out of blocks.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from starling_engine.kv.events import BlockSpan, EventLog
from starling_engine.kv.hashing import HashChain
from starling_engine.kv.pool import NULL_BLOCK, BlockPool, OutOfBlocks
from starling_engine.kv.spec import KVGroup, peak_blocks
from starling_engine.step import BlockCopy


@dataclass(slots=True)
class SequenceBlocks:
    """The blocks of a sequence. `tables[g][i]` is the physical block of logical block i in group g; all have equal length."""

    tables: list[list[int]]
    chain: HashChain
    reserved: int = 0
    known_tokens: int = 0
    """Tokens at admission: blocks for them are reserved."""
    cached_blocks: int = 0
    """Leading logical blocks that are cached in the pool by hash, whether found there or added."""
    found_blocks: int = 0
    """Leading logical blocks of these that were found; the sequence added the others."""
    last_search: tuple[int, int, list[list[int]]] | None = None
    """The last search of a prefix: number of tokens, the pool's version, and the tables found."""
    stored_chunks: int = 0
    """Chunks that were offered to the tiers, or come from there."""
    window_starts: list[int] = field(default_factory=list)
    leaves_at: int = 0
    """Number of tokens at which the next block leaves the window of a group."""
    salt: str | None = None
    """The cache salt in the chain's root, for listeners to KV events."""

    @property
    def num_blocks(self) -> int:
        return len(self.tables[0])


def agreed_length(groups: Iterable[int], limit: int, longest: Callable[[int, int], int]) -> int:
    """Returns the largest length that all groups have; `longest(group, limit)` is a group's largest of at most `limit`."""
    while True:
        agreed = limit
        for group in groups:
            agreed = longest(group, agreed)
        if agreed == limit:
            return limit
        limit = agreed


class KVManager:
    """Manages all block tables.

    `max_in_flight` is the most tokens of a sequence in flight: the step's token budget times the steps in flight.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_blocks: int,
        *,
        prefix_caching: bool = True,
        max_in_flight: int = 2048,
        events: EventLog | None = None,
    ) -> None:
        self.groups = list(groups)
        self.block_size = groups[0].spec.block_size
        assert all(g.spec.block_size == self.block_size for g in groups), "hits of groups meet at one block size"
        self.prefix_caching = prefix_caching
        self.events = EventLog(groups, published=False) if events is None else events
        """Takes what is stored and removed, for listeners."""
        self.pool = BlockPool(num_blocks, len(groups), self.events)
        self.reserved = 0
        self._max_in_flight = max_in_flight
        self.max_tokens = self._longest_sequence()
        """The longest sequence that the pool can hold alone."""
        self._windows = [g for g, group in enumerate(groups) if group.spec.window]
        self._search_order = sorted(range(len(groups)), key=lambda g: bool(groups[g].spec.window))
        """Groups in order of search, full attention first: without a hit there, windows need no search."""

    def new_sequence(self, root: bytes) -> SequenceBlocks:
        return SequenceBlocks([[] for _ in self.groups], HashChain(root, self.block_size), window_starts=[0] * len(self.groups))

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the blocks that a sequence of `num_tokens` has at its peak, over all groups."""
        return peak_blocks(self.groups, num_tokens, self._max_in_flight)

    @property
    def blocks_in_flight(self) -> int:
        """Blocks that the steps in flight may take."""
        return -(-self._max_in_flight // self.block_size) * len(self.groups)

    def _longest_sequence(self) -> int:
        low, high = 0, self.pool.num_usable * self.block_size
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.blocks_for(middle) <= self.pool.num_usable else (low, middle - 1)
        return low

    @property
    def num_available(self) -> int:
        """Free blocks that are not reserved."""
        return self.pool.num_free - self.reserved

    def find_prefix(self, sequence: SequenceBlocks, tokens: Sequence[int]) -> list[list[int]]:
        """Finds the longest cached prefix that every group has, at most all tokens but one. Takes no reference.

        Returns block tables [group][logical block]; blocks that a window does not need are NULL_BLOCK.
        """
        if not self.prefix_caching:
            return [[] for _ in self.groups]
        if sequence.last_search is not None and sequence.last_search[:2] == (len(tokens), self.pool.version):
            return sequence.last_search[2]
        sequence.chain.extend(tokens, len(tokens))
        hashes = sequence.chain.hashes[: (len(tokens) - 1) // self.block_size]
        length = agreed_length(self._search_order, len(hashes), lambda group, limit: self._hit_length(group, hashes, limit))
        tables = [self._hit_table(group, hashes[:length]) for group in range(len(self.groups))]
        sequence.last_search = (len(tokens), self.pool.version, tables)
        return tables

    def _hit_length(self, group: int, hashes: list[bytes], limit: int) -> int:
        """Returns the largest length <= limit, in blocks, for which the group has all that a next token would read.

        No Python loop goes over the blocks: a prompt may have thousands.
        """
        window = self.groups[group].spec.window
        if not window:
            return self.pool.num_leading(group, hashes[:limit])
        cached = self.pool.cached_mask(group, hashes[:limit])
        needed = -(-(window - 1) // self.block_size)
        at = cached.rfind(b"\1" * needed)
        return at + needed if at >= 0 else len(cached) - len(cached.lstrip(b"\1"))

    def _hit_table(self, group: int, hashes: list[bytes]) -> list[int]:
        first = self.groups[group].spec.first_needed_block(len(hashes) * self.block_size)
        found = (self.pool.find(group, block_hash) for block_hash in hashes[first:])
        return [NULL_BLOCK] * first + [block for block in found if block is not None]

    def admit(self, sequence: SequenceBlocks, tables: list[list[int]], num_tokens: int, headroom: int = 0) -> bool:
        """Takes the found blocks and reserves the rest of `num_tokens`.

        Returns False, with nothing taken, when fewer than `headroom` blocks would be left for others to grow into.
        """
        found = [block for table in tables for block in table if block != NULL_BLOCK]
        rest = max(0, self.blocks_for(num_tokens) - len(found))
        if rest + headroom > self.num_available - sum(map(self.pool.is_free, found)):
            return False
        for block in found:
            self.pool.share(block)
        sequence.tables = [list(table) for table in tables]
        sequence.cached_blocks = sequence.found_blocks = len(tables[0])
        sequence.known_tokens = num_tokens
        sequence.last_search = None
        sequence.reserved = rest
        self.reserved += rest
        return True

    def grow(self, sequence: SequenceBlocks, num_tokens: int) -> list[list[int]]:
        """Extends the tables to `num_tokens` tokens; returns the new blocks of each group. Raises OutOfBlocks."""
        missing = -(-num_tokens // self.block_size) - sequence.num_blocks
        if missing <= 0:
            return []
        wanted = missing * len(self.groups)
        reserved = min(sequence.reserved, wanted)
        if wanted - reserved > self.num_available:
            raise OutOfBlocks(wanted - reserved, self.num_available)
        sequence.reserved -= reserved
        self.reserved -= reserved
        taken = self.pool.take(wanted)
        new = [taken[g * missing : (g + 1) * missing] for g in range(len(self.groups))]
        for table, blocks in zip(sequence.tables, new, strict=True):
            table.extend(blocks)
        return new

    def trim(self, tables: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Returns the tables without the blocks that a token after `num_tokens` does not read."""
        firsts = [group.spec.first_needed_block(num_tokens) for group in self.groups]
        return [
            [NULL_BLOCK if index < first else block for index, block in enumerate(table)]
            for first, table in zip(firsts, tables, strict=True)
        ]

    def grow_for_load(self, sequence: SequenceBlocks, num_tokens: int) -> None:
        """Extends the tables to `num_tokens` tokens that will be loaded, with the blocks that a next token reads.

        The reserved blocks suffice.
        """
        for group, table in zip(self.groups, sequence.tables, strict=True):
            count = num_tokens // self.block_size - len(table)
            unread = min(count, max(0, group.spec.first_needed_block(num_tokens) - len(table)))
            assert count - unread <= sequence.reserved, "the reserved blocks suffice"
            sequence.reserved -= count - unread
            self.reserved -= count - unread
            table += [NULL_BLOCK] * unread + self.pool.take(count - unread)

    def fork_tables(self, parent: SequenceBlocks, num_tokens: int) -> list[list[int]] | None:
        """Returns the parent's blocks of the first `num_tokens` tokens; None if one of its windows has moved past them."""
        count = -(-num_tokens // self.block_size)
        tables = [table[:count] for table in parent.tables]
        for group, table in zip(self.groups, tables, strict=True):
            if len(table) < count or NULL_BLOCK in table[group.spec.first_needed_block(num_tokens) :]:
                return None
        return tables

    def make_writable(self, sequence: SequenceBlocks, position: int) -> list[BlockCopy]:
        """Copies on write: replaces shared blocks by new ones where `position` would be written. Returns the copies to make."""
        index, copies = position // self.block_size, []
        for group, table in enumerate(sequence.tables):
            if index < len(table) and self.pool.refs[table[index]] > 1:
                (copy,) = self.pool.take(1)
                reserved = min(sequence.reserved, 1)
                sequence.reserved -= reserved
                self.reserved -= reserved
                copies.append(BlockCopy(group, table[index], copy))
                self.pool.release(table[index])
                table[index] = copy
        return copies

    def free_behind_window(self, sequence: SequenceBlocks, num_computed: int) -> None:
        """Frees the blocks that no token from `num_computed` on can read. Called after every step, it mostly has none."""
        if num_computed < sequence.leaves_at or not self._windows:
            return
        for group in self._windows:
            first = self.groups[group].spec.first_needed_block(num_computed)
            table, freed = sequence.tables[group], 0
            for index in range(sequence.window_starts[group], first):
                if table[index] != NULL_BLOCK:
                    self.pool.release(table[index])
                    freed += self.pool.is_free(table[index])
                    table[index] = NULL_BLOCK
            self._reserve_again(sequence, freed)
            sequence.window_starts[group] = max(first, sequence.window_starts[group])
        ends = ((sequence.window_starts[group] + 1) * self.block_size + self.groups[group].spec.window for group in self._windows)
        sequence.leaves_at = min(ends) - 1

    def _reserve_again(self, sequence: SequenceBlocks, freed: int) -> None:
        """Reserves blocks that left a window for the same sequence, while its known tokens still need some."""
        missing = -(-sequence.known_tokens // self.block_size) - sequence.num_blocks
        more = min(freed, missing * len(self.groups) - sequence.reserved)
        if more > 0:
            sequence.reserved += more
            self.reserved += more

    def evict_own_blocks(self, sequence: SequenceBlocks) -> list[bytes]:
        """Evicts the blocks that the sequence itself added to the cache; returns their hashes."""
        hashes = sequence.chain.hashes[sequence.found_blocks : sequence.cached_blocks]
        for index, block_hash in enumerate(hashes, sequence.found_blocks):
            for group, table in enumerate(sequence.tables):
                if self.pool.find(group, block_hash) == table[index]:
                    self.pool.evict_block(table[index])
        sequence.cached_blocks = min(sequence.cached_blocks, sequence.found_blocks)
        return hashes

    def cache_blocks(self, sequence: SequenceBlocks, tokens: Sequence[int], num_confirmed: int) -> None:
        """Caches blocks that are full of confirmed tokens by their hashes, so that others can find them."""
        full = num_confirmed // self.block_size
        if not self.prefix_caching or full <= sequence.cached_blocks:
            return
        sequence.chain.extend(tokens, full * self.block_size)
        for index in range(sequence.cached_blocks, full):
            for group, table in enumerate(sequence.tables):
                if table[index] != NULL_BLOCK:
                    new = self.pool.cache_block(group, sequence.chain.hashes[index], table[index])
                    if new and self.events.is_open:
                        self.events.stored(group, self.span(sequence, tokens, index, 1))
        sequence.cached_blocks = full

    def span(self, sequence: SequenceBlocks, tokens: Sequence[int], first: int, count: int) -> BlockSpan:
        """Returns the span of `count` hashed blocks from the `first`-th on; tokens are packed, because the CPU tier stores them."""
        hashes, end = sequence.chain.hashes, first + count
        parent = hashes[first - 1] if first else None
        packed = array("I", tokens[first * self.block_size : end * self.block_size]) if self.events.published else ()
        return BlockSpan(hashes[first:end], parent, packed, sequence.salt)

    def release(self, sequence: SequenceBlocks) -> None:
        """Frees all blocks, the end of the sequence first, so that its beginning stays cached longest."""
        for table in sequence.tables:
            for block in reversed(table):
                if block != NULL_BLOCK:
                    self.pool.release(block)
            table.clear()
        self.reserved -= sequence.reserved
        sequence.reserved = sequence.cached_blocks = sequence.found_blocks = sequence.stored_chunks = sequence.known_tokens = 0
        sequence.window_starts = [0] * len(self.groups)
        sequence.leaves_at = 0
