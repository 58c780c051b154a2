"""A scheduler with a toy worker and toy tiers, for tests of scheduling and offloading.

The worker's "keys and values" are hashes of the prefix, and it checks every page that a query would read. It mirrors plans with the
real InputBatch, so a wrong block table, slot or count cannot go unseen.

The file is long because the toys are one machine: engine, worker, tiers, drafter and grammars share the toy's tokens and hashes.
"""

import random
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from starling_engine.config import SchedulerConfig, SpeculativeConfig, TiersConfig
from starling_engine.constraint import MaskRow
from starling_engine.delta import Delta
from starling_engine.kv.events import EventLog
from starling_engine.kv.manager import KVManager
from starling_engine.kv.snapshots import SnapshotSpacing
from starling_engine.kv.spec import ChunkedLocalSpec, KVGroup, KVSpec, StateGroup, StatePart, StateSpec, WindowSpec, pieces_of
from starling_engine.kv_offload.manager import TieredOffload
from starling_engine.kv_offload.orders import ChunkSlot, TransferDone, TransferOrder
from starling_engine.kv_offload.secondary.base import CHUNK
from starling_engine.params import PoolingParams, RepetitionDetectionParams, SamplingParams
from starling_engine.request import EngineRequest
from starling_engine.request_state import Gate, RequestState
from starling_engine.scheduler.grammar_builds import GrammarBuilds
from starling_engine.scheduler.scheduler import Scheduler
from starling_engine.spec_decode.drafter import Drafter
from starling_engine.step import FOLLOWS, OWN, LogprobRow, RowExtras, StepMasks, StepPlan, StepResult
from starling_engine.token_packing import pack_floats, pack_tokens
from starling_engine.worker.host.batch import FlatBatch, InputBatch

VOCAB = 50
SPACING = SnapshotSpacing(prompt=24, output=8, least=8)
"""Snapshots of a state lie so near each other because prompts are short here."""
NO_GRAMMAR = 13
"""Length at which a toy constraint says that it cannot be built."""


def prefix_hashes(tokens: list[int]) -> list[int]:
    """hashes[p] stands for the keys and values of position p: it depends on tokens 0..p. A draft that is none is computed as 0."""
    value, hashes = 1, []
    for token in tokens:
        value = zlib.crc32(max(token, 0).to_bytes(4, "little"), value)
        hashes.append(value)
    return hashes


def _token(prefix_hash: int, seed: int) -> int:
    return (prefix_hash ^ (seed * 7919)) % VOCAB


def token_after(tokens: list[int], seed: int) -> int:
    """Returns the token that the toy model samples behind `tokens`."""
    return _token(prefix_hashes(tokens)[-1], seed)


def first_allowed(token: int, mask: int) -> int:
    """Returns the token, or the next one that the mask allows: bit t is for token t."""
    return next(found for found in (*range(token, VOCAB), *range(token)) if mask >> found & 1)


class ToyConstraint:
    """Allows some tokens, by the output so far, but all of the first ones that are `free`.

    After `most` tokens nothing may follow; from `fails_at` on it has no answer, as a token or else a mask says.
    """

    words = -(-VOCAB // 32)

    def __init__(self, key: int, most: int, fails_at: int | None = None, free: int = 0, *, token_fails: bool = False) -> None:
        self.key = key
        self.most = most
        self.fails_at = fails_at
        self.free = free
        self.token_fails = token_fails
        self.output: list[int] = []
        self.error: str | None = None

    def mask(self, output: list[int]) -> int:
        if len(output) < self.free:
            return (1 << VOCAB) - 1
        rng = random.Random(zlib.crc32(bytes(output), self.key))
        return sum(1 << token for token in rng.sample(range(VOCAB), rng.choice([1, 3, 20])))

    @staticmethod
    def fill(rows: Sequence[MaskRow], bits: bytearray) -> None:
        size = 4 * ToyConstraint.words
        for constraint, drafts, first in rows:
            assert isinstance(constraint, ToyConstraint)
            assert constraint.error is None, "what has failed is asked for nothing"
            constraint._fail()
            for count in range(constraint.allowed(drafts) + 1):
                mask = constraint.mask([*constraint.output, *drafts[:count]])
                bits[size * (first + count) : size * (first + count + 1)] = mask.to_bytes(size, "little")

    def restricts(self, tokens: int) -> bool:
        return len(self.output) + tokens > self.free

    @property
    def is_finished(self) -> bool:
        return len(self.output) >= self.most

    def advance(self, token: int) -> None:
        assert self.mask(self.output) >> token & 1, "what is not allowed is never sampled"
        self.output.append(token)
        if self.token_fails:
            self._fail()

    def _fail(self) -> None:
        if self.fails_at is not None and len(self.output) >= self.fails_at:
            self.error = "it is told to fail"

    def forced(self, most: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < most and (mask := self.mask([*self.output, *tokens])).bit_count() == 1:
            tokens.append(mask.bit_length() - 1)
        return tokens

    def allowed(self, drafts: Sequence[int]) -> int:
        output = list(self.output)
        for count, token in enumerate(drafts):
            if not self.mask(output) >> token & 1:
                return count
            output.append(token)
        return len(drafts)


class ToyGrammars(GrammarBuilds):
    """Gives requests their constraints (`given`, by id) at random times; it tells some that there is none."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(None)
        self._rng = rng
        self._building: list[RequestState] = []
        self.given: dict[str, ToyConstraint] = {}

    @property
    def requests(self) -> set[RequestState]:
        return set(self._building)

    def start(self, request: RequestState) -> None:
        if request.record.grammar:
            request.gates.add(Gate.GRAMMAR)
            self._building.append(request)

    def finish(self, request: RequestState) -> None:
        if request in self._building:
            self._building.remove(request)

    def take_ready(self) -> list[tuple[RequestState, str | None]]:
        ready = [request for request in self._building if self._rng.random() < 0.5]
        return [(request, self._open(request)) for request in ready]

    def _open(self, request: RequestState) -> str | None:
        self._building.remove(request)
        request.gates.discard(Gate.GRAMMAR)
        request.constraint = self.given[request.record.id]
        return "no such grammar" if request.constraint.most == NO_GRAMMAR else None


def repeats(output: list[int], wanted: RepetitionDetectionParams) -> bool:
    """Looks for each pattern at the end of the output."""
    sizes, count = range(max(1, wanted.min_pattern_size), wanted.max_pattern_size + 1), wanted.min_count
    return any(len(output) >= size * count and output[-size * count :] == output[-size:] * count for size in sizes)


def expected_output(
    prompt: list[int], params: SamplingParams, seed: int, max_model_len: int, constraint: ToyConstraint | None = None
) -> list[int]:
    tokens, stops = list(prompt), set(params.stop_token_ids or ())
    limit = min(max_model_len, len(prompt) + (params.max_tokens or max_model_len))
    value = prefix_hashes(tokens)[-1]
    while len(tokens) < limit:
        token, output = _token(value, seed), tokens[len(prompt) :]
        tokens.append(token if constraint is None else first_allowed(token, constraint.mask(output)))
        value = zlib.crc32(tokens[-1].to_bytes(4, "little"), value)
        if tokens[-1] in stops or (constraint is not None and len(output) + 1 >= constraint.most):
            break
        if params.repetition_detection is not None and repeats(tokens[len(prompt) :], params.repetition_detection):
            break
    return tokens[len(prompt) :]


def groups_of(block_size: int, window: int = 0, chunk: int = 0) -> list[KVGroup]:
    sizes = (block_size, 1, 8, 4)
    kinds = [
        KVSpec(*sizes),
        *([WindowSpec(*sizes, window)] if window else []),
        *([ChunkedLocalSpec(*sizes, chunk)] if chunk else []),
    ]
    return [KVGroup(spec, (layer,)) for layer, spec in enumerate(kinds)]


def state_of(num_blocks: int) -> StateGroup:
    """Returns a group of one layer with a state of so many blocks. An engine gives it the size of its own blocks."""
    return StateGroup(StateSpec((StatePart(num_blocks, (8,)),)), (2,), num_blocks, 8)


class ToyWorker:
    def __init__(
        self,
        groups: list[KVGroup],
        max_num_seqs: int,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        state: StateGroup | None = None,
    ) -> None:
        self.groups = groups
        self.block_size = block_size
        self.batch = InputBatch(groups, max_num_seqs, max_model_len, self.block_size, state=state)
        self.state = state
        self.pages = np.zeros((num_blocks, self.block_size), np.int64)
        self.last_step = -1
        self.fail_on: set[int] = set()
        """Tokens: steps with a row whose prompt begins with one of them fail as a whole."""
        self.fail_from: dict[int, int] = {}
        """Numbers of tokens, by a prompt's first token, from which on steps with it fail as a whole."""
        self.broken: set[int] = set()
        """Tokens: rows whose prompt begins with one of them have an error of their own where they would sample."""
        self._lost: set[int] = set()
        """Slots of a step that failed: results of later steps in flight for them are garbage, which is discarded."""
        self.seconds: Callable[[StepPlan], float] = lambda _: 0.0
        """Returns the seconds that a step reports."""
        self.guess: Callable[[list[int], int, int], list[int]] = lambda *_: []
        """Returns as many OWN drafts behind tokens, for a seed, as the last argument says; or none."""

    def execute(self, plan: StepPlan, masks: StepMasks | None = None) -> StepResult:
        self.batch.apply(plan)
        self.last_step = plan.step_id
        for copy in plan.copies:
            self.pages[copy.target] = self.pages[copy.source]
        step = self.batch.gather(plan)
        inputs = self.batch.inputs(step)
        firsts = [int(self.batch.tokens[slot, 0]) for slot in plan.slots]
        late = any(end >= self.fail_from.get(first, end + 1) for first, end in zip(firsts, step.ends.tolist(), strict=True))
        self._lost -= {new.slot for new in plan.new}
        if late or not self.fail_on.isdisjoint(firsts):
            self._lost |= set(plan.slots)
            return StepResult(plan.step_id, plan.epoch, error="boom")
        assert len(set(plan.slots)) == len(plan.slots)
        result = StepResult(plan.step_id, plan.epoch, [0] * len(plan.slots), seconds=self.seconds(plan))
        result.unmatched = [r for r, slot in enumerate(plan.slots) if slot not in self._lost and not self._finds_drafts(step, r)]
        for r, slot in enumerate(plan.slots):
            if slot not in self._lost:
                self._store(step, r, inputs.metadata)
        self._masks = _masks_by_row(plan, step, masks)
        tokens = [token for r in range(len(plan.slots)) for token in self._sample(plan, step, r, result)]
        result.tokens = pack_tokens(tokens)
        return result

    def _finds_drafts(self, step: FlatBatch, r: int) -> bool:
        """Replaces a row's OWN drafts; returns False where there are none."""
        slot, end, drafts = step.slots[r], int(step.ends[r]), int(step.drafts[r])
        own = self.batch.tokens[slot, end - drafts : end]
        if OWN not in own:
            return True
        assert set(own.tolist()) == {OWN}
        tokens = self.batch.tokens[slot, : end - drafts].tolist()
        guesses = self.guess(tokens, int(self.batch.seed[slot]), drafts)
        own[:] = guesses or OWN
        return bool(guesses)

    def _store(self, step: FlatBatch, r: int, metadata: list) -> None:
        start, end = int(step.starts[r]), int(step.ends[r])
        hashes = prefix_hashes(self.batch.tokens[step.slots[r], :end].tolist())
        first = int(step.query_end[r]) - (end - start)
        if self.state is not None:
            *metadata, own = metadata
            blocks = own.block_tables[r].tolist()
            assert 0 not in blocks and len(set(blocks)) == len(blocks)
            assert not start or self._state_at(blocks) == hashes[start - 1], "the state is that of the tokens before"
            self._set_state(blocks, hashes[-1])
        for meta in metadata:
            for position in range(start, end):
                at = int(meta.slot_mapping[first + position - start])
                assert at >= self.block_size, "the null block is never written"
                self.pages[at // self.block_size, at % self.block_size] = hashes[position]

    def _state_at(self, blocks: list[int]) -> int:
        """Returns the state in some blocks: the hash of the last token that it has taken in."""
        state = int(self.pages[blocks[0], 0])
        assert all((self.pages[block] == state + number).all() for number, block in enumerate(blocks)), "blocks are of one state"
        return state

    def _set_state(self, blocks: list[int], state: int) -> None:
        for number, block in enumerate(blocks):
            self.pages[block] = state + number

    def _sample(self, plan: StepPlan, step: FlatBatch, r: int, result: StepResult) -> list[int]:
        """Fills in a row's results, and returns the tokens that it samples."""
        slot, start, end, drafts = plan.slots[r], int(step.starts[r]), int(step.ends[r]), int(step.drafts[r])
        if slot in self._lost:
            result.counts[r] = int(plan.sample[r])
            return [0] * result.counts[r]
        tokens = self.batch.tokens[slot, :end].tolist()
        hashes = prefix_hashes(tokens)
        for group, table in zip(self.groups, self.batch.tables, strict=False):  # that of a state comes last
            first, window = 0, group.spec.window
            if isinstance(group.spec, ChunkedLocalSpec):
                first = start // window * window
                assert end <= first + window, "a row is in one chunk"
            elif window:
                first = max(0, start - window + 1)
            for position in range(first, end):
                page = table[slot, position // self.block_size]
                assert self.pages[page, position % self.block_size] == hashes[position], (slot, position, page)
        scores = self._prompt_rows(plan, r, end)
        if scores is not None:
            result.extras_of(r).prompt_logprobs = scores
        if not plan.sample[r]:
            return []
        if tokens[0] in self.broken:
            result.extras[r] = RowExtras(error="not finite")
            self._lost.add(slot)
            return []
        if self.batch.slot_state(slot).pooling is not None:
            result.extras_of(r).pooled = pack_floats([float(hashes[-1])])
            return []
        if r in plan.masked and r not in self._masks:
            result.extras_of(r).error = "no mask"
            self._lost.add(slot)
            return []
        sampled: list[int] = []
        for offset, position in enumerate(range(end - 1 - drafts, end)):
            token = token_after(tokens[: position + 1], int(self.batch.seed[slot]))
            sampled.append(first_allowed(token, self._masks[r][offset]) if r in self._masks else token)
            if position + 1 < end and tokens[position + 1] != sampled[-1]:
                break
        result.counts[r] = len(sampled)
        length = end - drafts + len(sampled)
        if self.state is not None:  # what it has taken in of refused drafts is gone
            self._set_state(self.batch.tables[-1][slot, : self.state.num_blocks].tolist(), hashes[length - 2])
        self.batch.tokens[slot, length - len(sampled) : length] = sampled
        self.batch.lengths[slot] = length
        return sampled

    def _prompt_rows(self, plan: StepPlan, r: int, end: int) -> list[LogprobRow] | None:
        state = self.batch.slot_state(plan.slots[r])
        if state.sampling is None or state.sampling.prompt_logprobs is None or plan.starts[r] == FOLLOWS:
            return None
        following = self.batch.tokens[plan.slots[r], plan.starts[r] + 1 : min(end + 1, state.num_prompt)]
        return [LogprobRow([token], [0.0], 1) for token in following.tolist()]


def _masks_by_row(plan: StepPlan, step: FlatBatch, masks: StepMasks | None) -> dict[int, list[int]]:
    """Returns the masks of a row and of its drafts, by row."""
    found: dict[int, list[int]] = {}
    at, size = 0, 4 * ToyConstraint.words
    for row in masks.rows if masks is not None else ():
        count = 1 + int(step.drafts[row])
        assert row in plan.masked
        found[row] = [int.from_bytes(masks.bits[at + size * n : at + size * (n + 1)], "little") for n in range(count)]
        at += size * count
    assert masks is None or at == len(masks.bits)
    return found


class ToyDrafter(Drafter):
    """Drafts up to `most` tokens: the ones that will be sampled, as far as `rng` does not put others in their place.

    With steps in flight they are those behind all that was drafted before; where that was refused, they are wrong. With `own`, some
    rows without a mask have OWN drafts.
    """

    @property
    def active(self) -> bool:
        return True

    def __init__(self, most: int, rng: random.Random, *, own: bool) -> None:
        self.most = most
        self.rng = rng
        self.own = own

    def propose(self, request: RequestState, most: int) -> list[int]:
        tokens, length = request.tokens.tolist(), len(request.tokens) + request.pending
        count = self.rng.randint(0, min(most, self.most))
        if self.own and request.constraint is None and self.rng.random() < 0.5:
            return [OWN] * count
        while len(tokens) < length + count:
            token, output = token_after(tokens, request.record.seed), tokens[request.num_prompt :]
            constraint = request.constraint
            tokens.append(first_allowed(token, constraint.mask(output)) if isinstance(constraint, ToyConstraint) else token)
        return self._spoiled(tokens[length:])

    def guess(self, tokens: list[int], seed: int, count: int) -> list[int]:
        """Makes drafts where they are OWN, in some rows."""
        if self.rng.random() < 0.3:
            return []
        found = list(tokens)
        for _ in range(count):
            found.append(token_after(found, seed))
        return self._spoiled(found[len(tokens) :])

    def _spoiled(self, drafts: list[int]) -> list[int]:
        wrong = self.rng.choice([0.0, 0.2, 1.0])
        return [self.rng.randrange(VOCAB) if self.rng.random() < wrong else token for token in drafts]


class ToyTiers:
    """Chunk slots in host memory and a secondary tier, as a worker has them.

    Orders are carried out at random times, in random order (`rng`), and those of the secondary tier may fail. `secondary` outlives
    the engine.
    """

    def __init__(self, worker: ToyWorker, slots: int, secondary: dict[tuple[int, bytes], np.ndarray], rng: random.Random) -> None:
        self.worker = worker
        self.slots = np.zeros((slots, CHUNK), np.int64)
        self.secondary = secondary
        self.rng = rng
        self.orders: list[TransferOrder] = []
        self.fails = 0.0
        """Share of the secondary tier's operations that fail."""
        self.counts: Counter[str] = Counter()
        groups, state = len(worker.groups), worker.state
        pieces = pieces_of(state, CHUNK // worker.block_size) if state is not None else []
        self.pieces = range(groups, groups + len(pieces))
        """Groups of the pieces of snapshots."""

    def carry_out(self, *, all_of_it: bool = False) -> list[TransferDone]:
        """Carries out some of the orders."""
        self.rng.shuffle(self.orders)
        waiting = [order for order in self.orders if order.after > self.worker.last_step]
        ready = [order for order in self.orders if order.after <= self.worker.last_step]
        count = len(ready) if all_of_it else self.rng.randint(0, len(ready))
        self.orders = ready[count:] + waiting
        return [self._do(order) for order in ready[:count]]

    def _do(self, order: TransferOrder) -> TransferDone:
        match order.kind:
            case "store":
                done = [self._copy(at, to_pages=False) for at in order.chunks]
            case "load":
                assert order.after <= self.worker.last_step, "a step may still write there, or copy from there"
                done = [self._copy(at, to_pages=True) for at in order.chunks]
            case "look_up":
                done = [self._works() and self._is_outside(at) for at in order.chunks]
            case "promote":
                done = [self._promote(at) for at in order.chunks]
            case "write_back":
                done = [self._write_back(at) for at in order.chunks]
        self.counts[order.kind] += sum(done)
        return TransferDone(order.job, done, 1e-3)

    def _is_outside(self, at: ChunkSlot) -> bool:
        """Returns whether the chunk is there; the first piece of a snapshot stands for all of them."""
        groups = self.pieces if at.group in self.pieces else [at.group]
        return all((group, at.name) in self.secondary for group in groups)

    def _works(self) -> bool:
        return self.rng.random() >= self.fails

    def _copy(self, at: ChunkSlot, *, to_pages: bool) -> bool:
        size = self.worker.block_size
        for number, block in enumerate(at.blocks, at.first):
            slot = self.slots[at.slot, number * size : (number + 1) * size]
            if to_pages:
                self.worker.pages[block] = slot
            else:
                slot[:] = self.worker.pages[block]
        return True

    def _promote(self, at: ChunkSlot) -> bool:
        content = self.secondary.get((at.group, at.name)) if self._works() else None
        self.slots[at.slot] = -1 if content is None else content
        return content is not None

    def _write_back(self, at: ChunkSlot) -> bool:
        works = self._works()
        if works:
            self.secondary[at.group, at.name] = self.slots[at.slot].copy()
        return works


class ToyEngine:
    """Scheduler and toy worker, with `depth` steps in flight. `slots` > 0: with tiers; `secondary` outlives the engine.

    `drafts` > 0: with a drafter that proposes as many at most, right ones and wrong ones by `rng`; without several
    stages the worker makes some of them.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 8,
        window: int = 0,
        chunk: int = 0,
        groups: list[KVGroup] | None = None,
        depth: int = 1,
        max_num_seqs: int = 8,
        budget: int = 64,
        max_num_waiting: int = 1024,
        max_model_len: int = 128,
        step_target_ms: int = 0,
        stages: int = 1,
        policy: str = "fcfs",
        prefix_caching: bool = True,
        slots: int = 0,
        secondary: dict[tuple[int, bytes], np.ndarray] | None = None,
        preempt: str = "auto",
        cpu_policy: str = "lru",
        rng: random.Random | None = None,
        events: bool = False,
        drafts: int = 0,
        state: StateGroup | None = None,
    ) -> None:
        groups = groups_of(block_size, window, chunk) if groups is None else groups
        block_size = groups[0].spec.block_size if groups else block_size
        state = None if state is None else replace(state, block_size=block_size)
        self.log = EventLog(groups, state) if events else None
        self.config = SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_num_waiting=max_num_waiting,
            step_target_ms=step_target_ms,
            stages=stages,
            depth=depth,
            policy=policy,
            prefix_caching=prefix_caching,
            speculative=SpeculativeConfig(num_speculative_tokens=drafts),
        )
        self.kv = KVManager(
            groups,
            num_blocks,
            prefix_caching=prefix_caching,
            max_in_flight=depth * budget,
            events=self.log,
            state=state,
            spacing=replace(SPACING, unit=CHUNK) if slots else SPACING,
        )
        config = TiersConfig(cpu_bytes=slots, cpu_policy=cpu_policy, fs_path=None if secondary is None else "/secondary")
        self.offload = TieredOffload(self.kv, config, slots, 1, preempt) if slots else None
        drafter = ToyDrafter(drafts, rng or random.Random(0), own=stages == 1) if drafts else Drafter()
        self.grammars = ToyGrammars(rng or random.Random(0))
        self.scheduler = Scheduler(self.config, self.kv, offload=self.offload, drafter=drafter, grammars=self.grammars)
        self.worker = ToyWorker(groups, max_num_seqs, max_model_len, num_blocks, block_size, state)
        if isinstance(drafter, ToyDrafter):
            self.worker.guess = drafter.guess
        self.tiers = ToyTiers(self.worker, slots, {} if secondary is None else secondary, rng or random.Random(0))
        self.depth = depth
        self.plans: list[StepPlan] = []
        self.submitted: deque[StepPlan] = deque()
        """Plans that the worker has not begun: they wait for masks."""
        self.masks: deque[StepMasks] = deque()
        self.results: list[StepResult] = []
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, Delta] = {}
        self.prompt_rows: dict[str, list[LogprobRow]] = {}
        self.cached: dict[str, int] = {}
        self.waited: dict[tuple[str, int], float] = {}
        """Seconds that each attempt waited for its first step."""

    def add(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams | None = None,
        constraint: ToyConstraint | None = None,
        **fields: object,
    ) -> Delta | None:
        record = EngineRequest(id=request_id, prompt_ids=prompt, params=params or SamplingParams(), **fields)
        if constraint is not None:
            record.grammar = "toy"
            self.grammars.given[request_id] = constraint
        refusal = self.scheduler.answer_at_once(record)
        if refusal is None:
            self.scheduler.add(record)
        return refusal

    def embed(self, request_id: str, prompt: list[int], pooling: str = "last") -> None:
        self.add(request_id, prompt, pooling=PoolingParams(pooling=pooling))

    def step(self) -> StepPlan | None:
        """Plans until `depth` steps are in flight, then takes the oldest result. Returns the last plan made."""
        made = None
        for delta in self.scheduler.open_grammar_gates():
            self._take(delta)
        if self.offload is not None:
            self._transfer(all_of_it=not self.results)
        while self.scheduler.num_in_flight < self.depth and (plan := self.scheduler.schedule()) is not None:
            assert plan.total_tokens <= self.config.max_num_batched_tokens
            assert sum(plan.sample) + sum(plan.num_drafts) <= self.config.max_num_samples
            self.plans.append(plan)
            self.submitted.append(plan)
            made = plan
        if self.offload is not None:
            self._transfer(all_of_it=False)
        self._execute()
        if self.results:
            for delta in self.scheduler.update(self.results.pop(0)):
                self._take(delta)
        self._execute()
        return made

    def _execute(self) -> None:
        """Executes plans in their order, up to the first one whose masks are not there yet."""
        self.masks += self.scheduler.take_masks()
        while self.submitted and (self.masks or not self.submitted[0].masked):
            plan = self.submitted.popleft()
            masks = self.masks.popleft() if plan.masked else None
            assert masks is None or masks.step_id == plan.step_id, "a rank waits for masks in the order of steps"
            self.results.append(self.worker.execute(plan, masks))

    def _transfer(self, *, all_of_it: bool = True) -> None:
        """Carries out orders that wait for no step; all of them when nothing else can go on."""
        assert self.offload is not None
        self.tiers.orders += self.offload.take_orders()
        for done in self.tiers.carry_out(all_of_it=all_of_it):
            self.scheduler.on_transfer_done(done)

    def _take(self, delta: Delta) -> None:
        assert delta.id not in self.finished
        self.outputs.setdefault(delta.id, []).extend(delta.tokens)
        self.prompt_rows.setdefault(delta.id, []).extend(delta.prompt_logprobs or [])
        if delta.cached_tokens is not None:
            self.cached[delta.id] = delta.cached_tokens
        if delta.queue_seconds is not None:
            assert (delta.id, delta.attempt) not in self.waited, "told once"
            self.waited[delta.id, delta.attempt] = delta.queue_seconds
        assert (delta.id, delta.attempt) in self.waited or not delta.tokens
        if delta.finish_reason is not None:
            self.finished[delta.id] = delta

    def run(self, limit: int = 10_000) -> None:
        """Runs until idle; then everything must be given back."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, "no progress"
        for _ in range(100):
            if self.offload is None or not self.offload.has_pending_work:
                break
            self.step()
        self.scheduler.check_integrity()
        assert self.kv.pool.num_used == 0
