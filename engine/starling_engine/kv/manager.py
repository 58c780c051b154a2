"""Manages the blocks of sequences: block tables of all KV groups, recurrent state, prefix hits, forks, windows, and reservations.

A sequence is admitted only when the pool can hold all of its known tokens. Blocks that it has not taken yet are reserved, so two
half-prefilled prompts never wait for each other. Only growth by new output tokens can run out of blocks.

The file is long because all that a sequence holds is taken and given back by one class, whose counts have to agree.
"""

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from starling_engine.kv.events import BlockSpan, EventLog
from starling_engine.kv.hashing import HashChain
from starling_engine.kv.pool import NULL_BLOCK, BlockPool, OutOfBlocks
from starling_engine.kv.prefix_ends import End, PrefixEnds
from starling_engine.kv.seen_blocks import SeenBlocks
from starling_engine.kv.snapshots import SequenceState, SnapshotCache, SnapshotSpacing, prompt_stops
from starling_engine.kv.spec import ChunkedLocalSpec, KVGroup, StateGroup, peak_blocks
from starling_engine.step import BlockCopy


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """A prefix in the pool: its block tables [group][logical block], and its length in blocks, which all tables have."""

    tables: list[list[int]]
    length: int


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
    last_search: tuple[int, int, CachedPrefix] | None = None
    """The last search of a prefix: number of tokens, the version of what is cached or was seen, and what was found."""
    stored_chunks: int = 0
    """Chunks that were offered to the tiers, or come from there."""
    window_starts: list[int] = field(default_factory=list)
    leaves_at: int = 0
    """Number of tokens at which the next block leaves the window of a group."""
    salt: str | None = None
    """The cache salt in the chain's root, for listeners to KV events."""
    state: SequenceState = field(default_factory=SequenceState)
    found_snapshot: list[int] = field(default_factory=list)
    """Blocks of the snapshot at the end of the last search's prefix."""
    junction: int = 0
    """Tokens of its prefix that other sequences have had, as the last search says. While it runs, 0 unless several go on there."""
    goes_on_from: End | None = None
    """The kind of that prefix's end when the sequence started first; None where nobody had any of it."""
    shared_ends: list[int] = field(default_factory=list)
    """Lengths, in blocks, of its prefixes from which several sequences went on."""
    prompt_tokens: int = 0
    """Tokens at its first admission."""
    restores: list[BlockCopy] = field(default_factory=list)
    """Copies that make its state that of the snapshot; for the first step that it is in."""

    @property
    def num_blocks(self) -> int:
        """Logical blocks of each table. A model without tables has room for any number of tokens."""
        return len(self.tables[0]) if self.tables else sys.maxsize

    @property
    def worker_tables(self) -> list[list[int]]:
        """The block tables as the workers have them: that of the state comes last, where there is one."""
        return [*self.tables, self.state.blocks] if self.state.blocks else self.tables

    @property
    def held(self) -> list[list[int]]:
        """All blocks that the sequence has references to."""
        return [*self.tables, self.state.blocks, *self.state.copied.values()]


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
    """Manages all block tables. Sequences of a model without groups have none, and are as long as they want to be. Their state, if
    they have one, is found at a prefix's length all the same.

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
        state: StateGroup | None = None,
        spacing: SnapshotSpacing = SnapshotSpacing(),  # noqa: B008 - it is frozen
    ) -> None:
        self.groups = list(groups)
        sizes = [group.spec.block_size for group in groups] + ([] if state is None else [state.block_size])
        self.block_size = sizes[0] if sizes else 1
        assert set(sizes) <= {self.block_size}, "hits of groups meet at one block size"
        self.prefix_caching = prefix_caching and bool(sizes)
        self.events = EventLog(groups, state, published=False) if events is None else events
        """Takes what is stored and removed, for listeners."""
        self.state_blocks = state.num_blocks if state is not None else 0
        """Blocks of a sequence's recurrent state."""
        self.pool = BlockPool(num_blocks, len(groups) + (state is not None), self.events)
        self._snapshots = SnapshotCache(self.pool, len(groups), self.state_blocks)
        self._seen = SeenBlocks()
        self._ends = PrefixEnds()
        self._spacing = spacing
        unit = max(self.block_size, spacing.unit)
        self._output_spacing = -(-spacing.output // unit) * unit
        self.reserved = 0
        self._max_in_flight = max_in_flight
        self.max_tokens = self._longest_sequence() if groups else sys.maxsize
        """The longest sequence that the pool can hold alone."""
        self._windows = [g for g, group in enumerate(groups) if group.spec.window]
        self._attention_chunks = {group.spec.attention_chunk for group in groups if isinstance(group.spec, ChunkedLocalSpec)}
        self._search_order = sorted(range(len(groups)), key=lambda g: bool(groups[g].spec.window))
        """Groups in order of search, full attention first: without a hit there, windows need no search."""
        self._notes_ends = self.prefix_caching and bool(self._windows or self.state_blocks)
        """Says if prefixes are of no use without a window or a state at their end: these are kept where others will go on."""

    def new_sequence(self, root: bytes) -> SequenceBlocks:
        return SequenceBlocks([[] for _ in self.groups], HashChain(root, self.block_size), window_starts=[0] * len(self.groups))

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the blocks that a sequence of `num_tokens` has at its peak, over all groups."""
        return peak_blocks(self.groups, num_tokens, self._max_in_flight) + self.state_blocks

    def token_blocks(self, longest: int) -> int:
        """Returns for how many blocks of tokens there is room. A state alone stands for a sequence of `longest` tokens."""
        if self.groups or not self.state_blocks:
            return self.pool.num_usable
        return self.pool.num_usable // self.state_blocks * -(-longest // self.block_size)

    @property
    def blocks_in_flight(self) -> int:
        """Blocks that the steps in flight may take: with a state those of a request that starts, and of a snapshot."""
        return -(-self._max_in_flight // self.block_size) * len(self.groups) + 2 * self.state_blocks

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

    def find_prefix(self, sequence: SequenceBlocks, tokens: Sequence[int]) -> CachedPrefix:
        """Finds the longest cached prefix that every group has, at most all tokens but one. Takes no reference.

        Blocks that a window does not need are NULL_BLOCK in its tables.
        """
        if not self.prefix_caching:
            return CachedPrefix([[] for _ in self.groups], 0)
        searched = len(tokens), self.pool.version + self._seen.version
        if sequence.last_search is not None and sequence.last_search[:2] == searched:
            return sequence.last_search[2]
        sequence.chain.extend(tokens, len(tokens))
        hashes = sequence.chain.hashes[: (len(tokens) - 1) // self.block_size]
        length = agreed_length(self._search_order, len(hashes), lambda group, limit: self._hit_length(group, hashes, limit))
        if self._notes_ends:
            sequence.junction = self._seen.num_leading(hashes) * self.block_size
        if self.state_blocks:
            length = self._cut_to_snapshot(sequence, hashes, length)
        found = CachedPrefix([self._hit_table(group, hashes[:length]) for group in range(len(self.groups))], length)
        sequence.last_search = (*searched, found)
        return found

    def _cut_to_snapshot(self, sequence: SequenceBlocks, hashes: list[bytes], limit: int) -> int:
        """Returns the largest length <= limit, in blocks, behind which there are a snapshot and what a next token would read."""
        length = limit
        while length := self._snapshots.longest(hashes, length):
            agreed = agreed_length(self._search_order, length, lambda group, most: self._hit_length(group, hashes, most))
            if agreed == length:
                break
            length = agreed
        sequence.found_snapshot = (self._snapshots.find(hashes[length - 1]) or []) if length else []
        return length

    def _hit_length(self, group: int, hashes: list[bytes], limit: int) -> int:
        """Returns the largest length <= limit, in blocks, for which the group has all that a next token would read."""
        spec = self.groups[group].spec
        if not spec.window:
            return self.pool.num_leading(group, hashes[:limit])
        return spec.longest_hit(self.pool.cached_mask(group, hashes[:limit]))

    def _hit_table(self, group: int, hashes: list[bytes]) -> list[int]:
        first = self.groups[group].spec.first_needed_block(len(hashes) * self.block_size)
        found = (self.pool.find(group, block_hash) for block_hash in hashes[first:])
        return [NULL_BLOCK] * first + [block for block in found if block is not None]

    def admit(
        self,
        sequence: SequenceBlocks,
        tables: list[list[int]],
        num_tokens: int,
        headroom: int = 0,
        found_tokens: int = 0,
        external: int = 0,
    ) -> bool:
        """Takes the found blocks and reserves the rest of `num_tokens`, of which `external` ones after these come from a tier.

        Where there is a state, it begins with that of `found_tokens`.

        Returns False, with nothing taken, when fewer than `headroom` blocks would be left for others to grow into.
        """
        found = [block for table in tables for block in table if block != NULL_BLOCK]
        rest = self._blocks_to_take(tables, num_tokens)
        spare = self.num_available - sum(map(self.pool.is_free, found)) - rest - self.state_blocks - headroom
        if spare < 0:
            return False
        for block in found:
            self.pool.share(block)
        self._go_on(sequence, num_tokens)
        if self.state_blocks and external:
            self._start_external_state(sequence, found_tokens + external, num_tokens, with_snapshot=spare >= self.state_blocks)
        elif self.state_blocks:
            self._start_state(sequence, found_tokens, num_tokens)
        sequence.tables = [list(table) for table in tables]
        sequence.cached_blocks = sequence.found_blocks = len(tables[0]) if tables else found_tokens // self.block_size
        sequence.known_tokens = num_tokens
        sequence.last_search = None
        sequence.reserved = rest
        self.reserved += rest
        return True

    def _blocks_to_take(self, tables: list[list[int]], num_tokens: int) -> int:
        """Returns how many blocks a sequence has at its peak beside those that were found.

        A found block that leaves a window makes room for another one, but not while others hold it.
        """
        rest = 0
        for group, table in zip(self.groups, tables, strict=True):
            stays = not group.spec.window
            counted = sum(block != NULL_BLOCK and (stays or self.pool.is_free(block)) for block in table)
            missing = -(-num_tokens // self.block_size) - len(table)
            rest += max(0, min(missing, peak_blocks([group], num_tokens, self._max_in_flight) - counted))
        return rest

    def _go_on(self, sequence: SequenceBlocks, num_tokens: int) -> None:
        """Notes where a sequence that starts goes on from, and has a junction only where several do. A resumed one has none."""
        at = 0 if sequence.prompt_tokens else sequence.junction // self.block_size
        sequence.junction = 0
        sequence.prompt_tokens = sequence.prompt_tokens or num_tokens
        if at:
            names = sequence.chain.hashes[:at]
            sequence.goes_on_from = self._ends.meet(names[-1])
            sequence.shared_ends = self._ends.shared(names)
            sequence.junction = at * self.block_size if at in sequence.shared_ends else 0

    def _start_state(self, sequence: SequenceBlocks, start: int, num_tokens: int) -> None:
        """Takes blocks for the state, to which those of the snapshot at `start` tokens are copied. Kernels begin with zeros at 0.

        Where there is no room for both, the state takes those of the snapshot's blocks that nobody else reads or stores; the
        snapshot is then lost to others.
        """
        snapshot = sequence.found_snapshot if start else []
        for block in snapshot:  # it must not be taken for the state
            self.pool.share(block)
        if snapshot and self.num_available < self.state_blocks:
            self._snapshots.evict(sequence.chain.hashes[start // self.block_size - 1])
            blocks = [block if self.pool.refs[block] == 1 else self.pool.take(1)[0] for block in snapshot]
        else:
            blocks = self.pool.take(self.state_blocks)
        sequence.restores = self._state_copies(snapshot, blocks)
        worth = self._worth(sequence, start)
        for copy in sequence.restores:
            self.pool.release(copy.source, worth)
        sequence.state = SequenceState(blocks, self._prompt_stops(sequence, start, num_tokens))
        if start:
            sequence.state.found = sequence.chain.hashes[start // self.block_size - 1]

    def _start_external_state(self, sequence: SequenceBlocks, length: int, num_tokens: int, *, with_snapshot: bool) -> None:
        """Takes blocks for a state that comes from a tier, that of `length` tokens.

        It comes to a snapshot, from where it is copied to the state. Where there is room for one alone, it comes to the state.
        """
        blocks = self.pool.take(self.state_blocks)
        sequence.state = SequenceState(blocks, self._prompt_stops(sequence, length, num_tokens))
        sequence.restores = []
        if with_snapshot:
            sequence.state.stops.insert(0, length)  # it is a prompt's
            sequence.state.copied[length] = self.pool.take(self.state_blocks)
            sequence.restores = self._state_copies(sequence.state.copied[length], blocks)

    def _prompt_stops(self, sequence: SequenceBlocks, start: int, num_tokens: int) -> list[int]:
        if not self.prefix_caching:
            return []
        return prompt_stops(start, num_tokens, sequence.junction, self.block_size, self._spacing)

    def _state_copies(self, sources: Sequence[int], targets: Sequence[int]) -> list[BlockCopy]:
        pairs = zip(sources, targets, strict=False)
        return [BlockCopy(len(self.groups), source, target) for source, target in pairs if source != target]

    def take_restores(self, sequence: SequenceBlocks) -> list[BlockCopy]:
        """Returns the copies that make the sequence's state that of a snapshot, for its first step; nothing for later ones."""
        restores, sequence.restores = sequence.restores, []
        return restores

    def external_state(self, sequence: SequenceBlocks, length: int) -> list[int]:
        """Returns the blocks to which the state at `length` tokens is to come from a tier."""
        return sequence.state.copied.get(length, sequence.state.blocks)

    def cache_external_state(self, sequence: SequenceBlocks, tokens: Sequence[int], length: int) -> None:
        """Caches the snapshot at `length` tokens, which has come from a tier; nothing where there was no room for one."""
        if length in sequence.state.copied:
            self._add_snapshot(sequence, tokens, length, sequence.state.copied[length])

    def _add_snapshot(self, sequence: SequenceBlocks, tokens: Sequence[int], length: int, blocks: list[int]) -> bool:
        """Caches a snapshot. Returns False where there is one of the same prefix already."""
        at = length // self.block_size - 1
        name = sequence.chain.hashes[at]
        if not self._snapshots.add(name, blocks):
            return False
        sequence.state.named[length] = name
        if self.events.is_open:
            self.events.stored(len(self.groups), self.span(sequence, tokens, at, 1))
        return True

    def cached(self) -> Iterator[tuple[int, bytes]]:
        """Yields all cached blocks by their group and hash; a snapshot is a block of the group behind all others."""
        for group in range(len(self.groups)):
            yield from ((group, name) for name in self.pool.cached(group))
        if self.state_blocks:
            yield from ((len(self.groups), name) for name in self._snapshots.names())

    def find_snapshot(self, name: bytes) -> list[int] | None:
        """Returns the blocks of the snapshot behind a prefix; None unless all are there."""
        return self._snapshots.find(name) if self.state_blocks else None

    def tokens_to_stop(self, sequence: SequenceBlocks, start: int) -> int:
        """Returns the most tokens that a row from `start` may have: to a snapshot that is wanted, or an attention chunk's end."""
        stops = [stop for stop in sequence.state.stops if stop > start][:1]
        stops += [(start // chunk + 1) * chunk for chunk in self._attention_chunks]
        if self.state_blocks and self.prefix_caching:
            known = max(start + 1, sequence.known_tokens)
            stops.append(-(-known // self._output_spacing) * self._output_spacing)
        return min(stops, default=sys.maxsize) - start

    def in_one_attention_chunk(self, first: int, last: int) -> bool:
        """Returns whether tokens at these positions are in one attention chunk, where layers attend so."""
        return all(first // chunk == last // chunk for chunk in self._attention_chunks)

    def wants_snapshot(self, sequence: SequenceBlocks, length: int) -> bool:
        """Returns whether there should be a snapshot of the state at a length that a row begins with."""
        if not self.state_blocks or not self.prefix_caching:
            return False
        return length in sequence.state.stops or (length >= sequence.known_tokens and length % self._output_spacing == 0)

    def take_snapshot(self, sequence: SequenceBlocks, length: int, headroom: int) -> list[BlockCopy]:
        """Returns the copies of a snapshot, for a step that begins with token `length`; none where none is wanted or possible.

        `headroom` blocks are left for others to grow into.
        """
        state = sequence.state
        if not self.wants_snapshot(sequence, length) or self.state_blocks + headroom > self.num_available:
            return []
        if length in state.copied:  # it has come from a tier
            return []
        hashes = sequence.chain.hashes[length // self.block_size - 1 :][:1]
        if hashes and self._snapshots.find(hashes[0]) is not None:
            return []
        state.copied[length] = blocks = self.pool.take(self.state_blocks)
        return self._state_copies(state.blocks, blocks)

    def name_snapshots(self, sequence: SequenceBlocks, tokens: Sequence[int], num_confirmed: int) -> list[int]:
        """Caches snapshots that steps have copied whose results are here. Of an output the last one stays.

        Returns their lengths, without those in its output, of which the next one may take the place.
        """
        state, new = sequence.state, []
        for length in [length for length in state.copied if length < num_confirmed]:
            blocks = state.copied.pop(length)
            if length not in state.stops:
                for other, replaced in state.output_names.items():
                    self._snapshots.evict(replaced)
                    del state.named[other]
            if self._add_snapshot(sequence, tokens, length, blocks):
                new += [length] if length in state.stops else []
            self._release_snapshot(sequence, length, blocks)
            self._spend_snapshots(sequence, length)
        return new

    def _release_snapshot(self, sequence: SequenceBlocks, length: int, blocks: list[int]) -> None:
        worth = self._worth(sequence, length)
        for block in blocks:
            self.pool.release(block, worth)

    def _next_turn(self, sequence: SequenceBlocks) -> End | None:
        """Returns where the next turn will go on: as this one did, or as nearly all do. None where that is not known."""
        return sequence.goes_on_from if sequence.goes_on_from in {"prompt", "output"} else self._ends.usual

    def _spend_snapshots(self, sequence: SequenceBlocks, length: int) -> None:
        """Spends the snapshots that the next turn has no use of, now that there is one at `length`.

        Who goes on behind an output wants the last snapshot alone; who goes on behind a prompt, that of the last prompt.
        """
        state, end = sequence.state, self._next_turn(sequence)
        in_output = length not in state.stops
        if in_output and end == "prompt" and length in state.named:  # it may be another sequence's
            self._snapshots.spend(state.named[length])
        if in_output and end != "output":
            return
        earlier = [name for at, name in state.named.items() if at < length]
        if state.found is not None and sequence.goes_on_from in {"prompt", "output"}:
            earlier.append(state.found)
        for name in earlier:
            if not self._ends.is_shared(name):
                self._snapshots.spend(name)

    def grow(self, sequence: SequenceBlocks, num_tokens: int) -> list[list[int]]:
        """Extends the tables to `num_tokens` tokens; returns the new blocks of each group. Raises OutOfBlocks."""
        if not self.groups:
            return []
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
        """Returns the parent's blocks of the first `num_tokens` tokens; None if a window or a state has moved on."""
        if self.state_blocks:
            return None
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
        worth = self._worth(sequence, num_computed)
        for group in self._windows:
            first = self.groups[group].spec.first_needed_block(num_computed)
            table, freed = sequence.tables[group], 0
            for index in range(sequence.window_starts[group], first):
                if table[index] != NULL_BLOCK:
                    self.pool.release(table[index], worth if self._is_kept(sequence, group, index) else 0.0)
                    freed += self.pool.is_free(table[index])
                    table[index] = NULL_BLOCK
            self._reserve_again(sequence, freed)
            sequence.window_starts[group] = max(first, sequence.window_starts[group])
        sequence.leaves_at = min(self.groups[group].spec.leaves_at(sequence.window_starts[group]) for group in self._windows)

    def _is_kept(self, sequence: SequenceBlocks, group: int, index: int) -> bool:
        """Returns whether others need a block that has left the sequence's window.

        Those who share its beginning do, and the next turn, where that may go on behind the prompt. Templates may end a prompt
        otherwise once it has an answer, so there is a block to spare.
        """
        spec, prompt = self.groups[group].spec, sequence.prompt_tokens // self.block_size
        if self._next_turn(sequence) != "output" and spec.first_needed_block((prompt - 1) * self.block_size) <= index < prompt:
            return True
        return any(spec.first_needed_block(end * self.block_size) <= index < end for end in sequence.shared_ends)

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
        for name in sequence.state.named.values():
            self._snapshots.evict(name)
        sequence.state.named.clear()
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
        if self._notes_ends:
            self._seen.add(sequence.chain.hashes[sequence.cached_blocks : full])
        sequence.cached_blocks = full

    def span(self, sequence: SequenceBlocks, tokens: Sequence[int], first: int, count: int) -> BlockSpan:
        """Returns the span of `count` hashed blocks from the `first`-th on; tokens are packed, because the CPU tier stores them."""
        hashes, end = sequence.chain.hashes, first + count
        parent = hashes[first - 1] if first else None
        packed = array("I", tokens[first * self.block_size : end * self.block_size]) if self.events.published else ()
        return BlockSpan(hashes[first:end], parent, packed, sequence.salt)

    def release(self, sequence: SequenceBlocks, *, resumes: bool = False) -> None:
        """Frees all blocks, the end of the sequence first, so that its beginning stays cached longest.

        A snapshot comes behind the blocks after it, which are of no use without it, and before those that it needs itself.
        If it does not resume, and the next turn will go on behind its prompt, its output is spent.
        """
        if self._notes_ends and sequence.cached_blocks:
            self._note_ends(sequence)
        for block in sequence.state.blocks:
            self.pool.release(block)
        for length, blocks in sequence.state.copied.items():
            self._release_snapshot(sequence, length, blocks)
        sequence.state = SequenceState()
        sequence.restores = []
        spent_from = sys.maxsize
        if not resumes and self._notes_ends and self._next_turn(sequence) == "prompt":
            spent_from = sequence.prompt_tokens // self.block_size
        worth = self._worth(sequence, sequence.cached_blocks * self.block_size)
        snapshots = self._snapshots.along(sequence.chain.hashes[: sequence.cached_blocks]) if self.state_blocks else {}
        for index in range(max(map(len, sequence.tables), default=sequence.cached_blocks) - 1, -1, -1):
            if index in snapshots:
                self._snapshots.touch(snapshots[index])
            for table in sequence.tables:
                if table[index] != NULL_BLOCK:
                    self.pool.release(table[index], worth if index < spent_from else 0.0)
        for table in sequence.tables:
            table.clear()
        self.reserved -= sequence.reserved
        sequence.reserved = sequence.cached_blocks = sequence.found_blocks = sequence.stored_chunks = sequence.known_tokens = 0
        sequence.window_starts = [0] * len(self.groups)
        sequence.leaves_at = 0

    def _worth(self, sequence: SequenceBlocks, length: int) -> float:
        """Returns how many tokens each block of a prefix spares, beyond the last beginning that several sequences share.

        Keys and values of all tokens are worth the same, whatever the length. But a state, or a window, takes as many blocks after
        a long text as after a short one. (Marconi, arXiv 2411.19379, weighs states so.)
        """
        if not self._notes_ends:
            return 1.0
        shared = max((end * self.block_size for end in sequence.shared_ends if end * self.block_size < length), default=0)
        spared = length - shared
        return spared / max(1, peak_blocks(self.groups, spared, 0) + self.state_blocks)

    def _note_ends(self, sequence: SequenceBlocks) -> None:
        hashes, prompt = sequence.chain.hashes, sequence.prompt_tokens // self.block_size
        if 0 < prompt <= sequence.cached_blocks:
            self._ends.note(hashes[prompt - 1], "prompt")
        self._ends.note(hashes[sequence.cached_blocks - 1], "output")
