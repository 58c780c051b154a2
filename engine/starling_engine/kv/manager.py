"""Who holds which blocks: block tables of all KV groups, prefix hits, forks, windows, and reservations.

A sequence is admitted only when the pool can hold all of its known tokens. What it has not taken yet of them is reserved, so that
two half-prefilled prompts never wait for each other; only growth by new output tokens can run out of blocks.
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
    """The blocks of one sequence. `tables[g][i]` is the physical block of logical block i in group g; all have equal length."""

    tables: list[list[int]]
    chain: HashChain
    reserved: int = 0
    known_tokens: int = 0
    """That it was admitted with: blocks for them are promised."""
    cached_blocks: int = 0
    """Logical blocks that are named in the pool, or were found there."""
    found_blocks: int = 0
    """Logical blocks of these that were found: it has named those behind them."""
    sought: tuple[int, int, list[list[int]]] | None = None
    """What was found last, of so many tokens, and the state of the pool's names then."""
    saved_chunks: int = 0
    """Chunks that the tiers have been told of, or come from there."""
    window_starts: list[int] = field(default_factory=list)
    leaves_at: int = 0
    """Tokens with which the next block leaves the window of a group; nothing does before."""
    adapter: str | None = None
    salts: tuple[str, ...] = ()
    """What besides the adapter went into the chain's root, for those who hear of its blocks."""

    @property
    def num_blocks(self) -> int:
        return len(self.tables[0])


def agreed_length(groups: Iterable[int], limit: int, longest: Callable[[int, int], int]) -> int:
    """The largest length that all groups have; `longest(group, limit)` is one group's that is at most `limit`."""
    while True:
        agreed = limit
        for group in groups:
            agreed = longest(group, agreed)
        if agreed == limit:
            return limit
        limit = agreed


class KVManager:
    """`chunk` is the most tokens that one sequence can have in flight: the step's budget times the steps in flight."""

    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_blocks: int,
        *,
        prefix_caching: bool = True,
        chunk: int = 2048,
        log: EventLog | None = None,
    ) -> None:
        self.groups = list(groups)
        self.block_size = groups[0].spec.block_size
        assert all(g.spec.block_size == self.block_size for g in groups), "hits of groups meet at one block size"
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_blocks, len(groups), log)
        self.log = log
        """Who is told of what is cached; None where nobody listens."""
        self.reserved = 0
        self._chunk = chunk
        self.max_tokens = self._longest_sequence()
        """The longest sequence that the pool can hold alone."""
        self._windows = [g for g, group in enumerate(groups) if group.spec.window]
        self._search_order = sorted(range(len(groups)), key=lambda g: bool(groups[g].spec.window))
        """Full groups first: where one of them has nothing, windows need not be looked through."""

    def holding(self, root: bytes) -> SequenceBlocks:
        return SequenceBlocks([[] for _ in self.groups], HashChain(root, self.block_size), window_starts=[0] * len(self.groups))

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` holds at its peak, over all groups."""
        return peak_blocks(self.groups, num_tokens, self._chunk)

    @property
    def blocks_in_flight(self) -> int:
        """Blocks that the steps in flight may take."""
        return -(-self._chunk // self.block_size) * len(self.groups)

    def _longest_sequence(self) -> int:
        low, high = 0, self.pool.num_usable * self.block_size
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.blocks_for(middle) <= self.pool.num_usable else (low, middle - 1)
        return low

    @property
    def num_available(self) -> int:
        """Free blocks that nobody has been promised."""
        return self.pool.num_free - self.reserved

    def find_prefix(self, holding: SequenceBlocks, tokens: Sequence[int]) -> list[list[int]]:
        """The longest cached prefix that every group has, at most all tokens but one. Takes no reference.

        Returns block tables [group][logical block]; blocks that a window does not need are NULL_BLOCK.
        """
        if not self.prefix_caching:
            return [[] for _ in self.groups]
        if holding.sought is not None and holding.sought[:2] == (len(tokens), self.pool.version):
            return holding.sought[2]
        holding.chain.extend(tokens, len(tokens))
        names = holding.chain.names[: (len(tokens) - 1) // self.block_size]
        length = agreed_length(self._search_order, len(names), lambda group, limit: self._hit_length(group, names, limit))
        tables = [self._hit_table(group, names[:length]) for group in range(len(self.groups))]
        holding.sought = (len(tokens), self.pool.version, tables)
        return tables

    def _hit_length(self, group: int, names: list[bytes], limit: int) -> int:
        """The largest length <= limit, in blocks, of which the group has all that a next token would read.

        No loop in Python goes over the blocks: a prompt may have thousands.
        """
        window = self.groups[group].spec.window
        if not window:
            return self.pool.num_leading(group, names[:limit])
        there = self.pool.which(group, names[:limit])
        needed = -(-(window - 1) // self.block_size)
        at = there.rfind(b"\1" * needed)
        return at + needed if at >= 0 else len(there) - len(there.lstrip(b"\1"))

    def _hit_table(self, group: int, names: list[bytes]) -> list[int]:
        first = self.groups[group].spec.first_needed_block(len(names) * self.block_size)
        found = (self.pool.find(group, name) for name in names[first:])
        return [NULL_BLOCK] * first + [block for block in found if block is not None]

    def admit(self, holding: SequenceBlocks, tables: list[list[int]], num_tokens: int, headroom: int = 0) -> bool:
        """Takes the found blocks and reserves the rest of `num_tokens`.

        Returns False, with nothing taken, when fewer than `headroom` blocks would be left for others to grow into.
        """
        held = [block for table in tables for block in table if block != NULL_BLOCK]
        rest = max(0, self.blocks_for(num_tokens) - len(held))
        if rest + headroom > self.num_available - sum(map(self.pool.is_free, held)):
            return False
        for block in held:
            self.pool.share(block)
        holding.tables = [list(table) for table in tables]
        holding.cached_blocks = holding.found_blocks = len(tables[0])
        holding.known_tokens = num_tokens
        holding.sought = None
        holding.reserved = rest
        self.reserved += rest
        return True

    def grow(self, holding: SequenceBlocks, num_tokens: int) -> list[list[int]]:
        """Makes the tables cover `num_tokens` tokens; returns the new blocks of each group. Raises OutOfBlocks."""
        missing = -(-num_tokens // self.block_size) - holding.num_blocks
        if missing <= 0:
            return []
        wanted = missing * len(self.groups)
        promised = min(holding.reserved, wanted)
        if wanted - promised > self.num_available:
            raise OutOfBlocks(f"{wanted - promised} blocks wanted, {self.num_available} free and not promised")
        holding.reserved -= promised
        self.reserved -= promised
        taken = self.pool.take(wanted)
        new = [taken[g * missing : (g + 1) * missing] for g in range(len(self.groups))]
        for table, blocks in zip(holding.tables, new, strict=True):
            table.extend(blocks)
        return new

    def trim(self, tables: list[list[int]], num_tokens: int) -> list[list[int]]:
        """The tables without the blocks that a token after `num_tokens` does not read."""
        firsts = [group.spec.first_needed_block(num_tokens) for group in self.groups]
        return [
            [NULL_BLOCK if index < first else block for index, block in enumerate(table)]
            for first, table in zip(firsts, tables, strict=True)
        ]

    def make_room(self, holding: SequenceBlocks, num_tokens: int) -> None:
        """Makes the tables cover `num_tokens` tokens that come from elsewhere, as far as a next token reads them.

        What was reserved is enough for that.
        """
        for group, table in zip(self.groups, holding.tables, strict=True):
            count = num_tokens // self.block_size - len(table)
            unread = min(count, max(0, group.spec.first_needed_block(num_tokens) - len(table)))
            assert count - unread <= holding.reserved, "what was reserved is enough"
            holding.reserved -= count - unread
            self.reserved -= count - unread
            table += [NULL_BLOCK] * unread + self.pool.take(count - unread)

    def fork_tables(self, parent: SequenceBlocks, num_tokens: int) -> list[list[int]] | None:
        """The parent's blocks that hold the first `num_tokens` tokens; None if a window of it has moved past them."""
        count = -(-num_tokens // self.block_size)
        tables = [table[:count] for table in parent.tables]
        for group, table in zip(self.groups, tables, strict=True):
            if len(table) < count or NULL_BLOCK in table[group.spec.first_needed_block(num_tokens) :]:
                return None
        return tables

    def make_writable(self, holding: SequenceBlocks, position: int) -> list[BlockCopy]:
        """Copy-on-write: gives the sequence blocks of its own where `position` would be written into shared ones."""
        index, copies = position // self.block_size, []
        for group, table in enumerate(holding.tables):
            if index < len(table) and self.pool.refs[table[index]] > 1:
                (own,) = self.pool.take(1)
                promised = min(holding.reserved, 1)
                holding.reserved -= promised
                self.reserved -= promised
                copies.append(BlockCopy(group, table[index], own))
                self.pool.release(table[index])
                table[index] = own
        return copies

    def leave_window(self, holding: SequenceBlocks, num_computed: int) -> None:
        """Frees the blocks that no token from `num_computed` on can read. It is asked after every step, and mostly has none."""
        if num_computed < holding.leaves_at or not self._windows:
            return
        for group in self._windows:
            first = self.groups[group].spec.first_needed_block(num_computed)
            table, freed = holding.tables[group], 0
            for index in range(holding.window_starts[group], first):
                if table[index] != NULL_BLOCK:
                    self.pool.release(table[index])
                    freed += self.pool.is_free(table[index])
                    table[index] = NULL_BLOCK
            self._promise_again(holding, freed)
            holding.window_starts[group] = max(first, holding.window_starts[group])
        ends = ((holding.window_starts[group] + 1) * self.block_size + self.groups[group].spec.window for group in self._windows)
        holding.leaves_at = min(ends) - 1

    def _promise_again(self, holding: SequenceBlocks, freed: int) -> None:
        """What a window has left goes to the same sequence, as far as its known tokens still want blocks."""
        missing = -(-holding.known_tokens // self.block_size) - holding.num_blocks
        more = min(freed, missing * len(self.groups) - holding.reserved)
        if more > 0:
            holding.reserved += more
            self.reserved += more

    def forget_own(self, holding: SequenceBlocks) -> list[bytes]:
        """Takes back the names that the sequence itself has given: returns them."""
        names = holding.chain.names[holding.found_blocks : holding.cached_blocks]
        for index, name in enumerate(names, holding.found_blocks):
            for group, table in enumerate(holding.tables):
                if self.pool.find(group, name) == table[index]:
                    self.pool.forget(table[index])
        holding.cached_blocks = min(holding.cached_blocks, holding.found_blocks)
        return names

    def remember(self, holding: SequenceBlocks, tokens: Sequence[int], num_confirmed: int) -> None:
        """Names the blocks that are full of confirmed tokens, so that others can find them."""
        full = num_confirmed // self.block_size
        if not self.prefix_caching or full <= holding.cached_blocks:
            return
        holding.chain.extend(tokens, full * self.block_size)
        for index in range(holding.cached_blocks, full):
            for group, table in enumerate(holding.tables):
                if table[index] != NULL_BLOCK:
                    new = self.pool.remember(group, holding.chain.names[index], table[index])
                    if new and self.log is not None:
                        self.log.stored(group, self.span(holding, tokens, index, 1))
        holding.cached_blocks = full

    def span(self, holding: SequenceBlocks, tokens: Sequence[int], first: int, count: int) -> BlockSpan:
        """Of `count` named blocks from the `first`-th on; the tokens are packed, as the CPU tier keeps them for long."""
        names, end = holding.chain.names, first + count
        parent = names[first - 1] if first else None
        told = array("I", tokens[first * self.block_size : end * self.block_size]) if self.log is not None else ()
        return BlockSpan(names[first:end], parent, told, holding.adapter, holding.salts)

    def release(self, holding: SequenceBlocks) -> None:
        """Gives everything back; the end of a sequence becomes free first, so that its beginning stays cached longest."""
        for table in holding.tables:
            for block in reversed(table):
                if block != NULL_BLOCK:
                    self.pool.release(block)
            table.clear()
        self.reserved -= holding.reserved
        holding.reserved = holding.cached_blocks = holding.found_blocks = holding.saved_chunks = holding.known_tokens = 0
        holding.window_starts = [0] * len(self.groups)
        holding.leaves_at = 0
