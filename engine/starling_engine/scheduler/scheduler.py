"""Decides what runs in each step.

There is one rule: every request runs from its planned tokens to all it has, within the step's token budget. Decode, chunked
prefill, prefix hits and resumed requests are cases of it.

The file is long because planning, blocks, batch slots and results change the same few lists. What decides without them is apart.
"""

import logging
from collections.abc import Sequence

from starling_engine.config import SchedulerConfig
from starling_engine.delta import MOVED, Delta, Stats
from starling_engine.kv.hashing import chain_root
from starling_engine.kv.manager import KVManager
from starling_engine.kv.pool import OutOfBlocks
from starling_engine.kv_offload.base import OffloadManager
from starling_engine.kv_offload.orders import TransferDone
from starling_engine.kv_offload.secondary.base import CHUNK
from starling_engine.request import EngineRequest
from starling_engine.request_state import EVENT_GATES, Gate, RequestState, RequestStatus
from starling_engine.scheduler.grammar_builds import GrammarBuilds
from starling_engine.scheduler.preemption_log import PreemptionLog
from starling_engine.scheduler.prefill import PrefillBudget, PromptLead, shares
from starling_engine.scheduler.prefix import PrefixHit, PrefixLookup
from starling_engine.scheduler.prompt_hashing import PromptHashing
from starling_engine.scheduler.queue import make_queue
from starling_engine.scheduler.step_builder import StepBuilder
from starling_engine.scheduler.step_masks import take_due_masks
from starling_engine.scheduler.suspects import Suspects
from starling_engine.spec_decode.drafter import Drafter
from starling_engine.spec_decode.speculator import Speculator
from starling_engine.step import FOLLOWS, BlockAppend, RowExtras, StepMasks, StepPlan, StepResult
from starling_engine.token_packing import unpack_tokens

logger = logging.getLogger("starling.scheduler")

NO_EXTRAS = RowExtras()


class Scheduler:
    """Owns requests, batch slots and block tables. Not thread-safe: one engine core drives it."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        epoch: int = 0,
        offload: OffloadManager | None = None,
        drafter: Drafter | None = None,
        grammars: GrammarBuilds | None = None,
    ) -> None:
        self.config = config
        self.kv = kv
        self.offload = offload or OffloadManager()
        self.epoch = epoch
        self.requests: dict[str, RequestState] = {}
        self.waiting = make_queue(config.policy)
        self.running: list[RequestState] = []
        self._suspects = Suspects()
        self._trial = -1
        """The last step that ran suspects; there is one such step in flight at a time."""
        self._forks: dict[str, list[RequestState]] = {}
        """Requests that wait for their parent's prompt, by the parent's id."""
        self.stats = Stats(kv_blocks=kv.pool.num_usable, kv_token_blocks=kv.token_blocks(config.max_model_len))
        self.drafter = drafter or Speculator(config.speculative, self.stats, own_drafts=config.own_drafts)
        self._grammars = grammars or GrammarBuilds(None)
        self._prefixes = PrefixLookup(kv, self.offload, self.requests)
        self._hashing = PromptHashing()
        self._preemptions = PreemptionLog()
        self._prefill = PrefillBudget((config.step_target_ms or 0) / 1000, kv.block_size)
        self._lead = PromptLead(config.policy)
        self._in_flight: dict[int, StepBuilder] = {}
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._freed_slots: list[int] = []
        self._step_id = 0

    # ---- requests ----

    def answer_at_once(self, record: EngineRequest) -> Delta | None:
        """Returns the answer to a request that cannot run, or has all its output already; None when it is to be added."""
        params = record.params
        length = len(record.prompt_ids) + len(record.output_ids)
        wanted = length if record.pooling else length + 1
        limit = min(self.config.max_model_len, self.kv.max_tokens)
        problem: tuple[str, str | None] | None = None
        running = self.requests.get(record.id)
        if running is not None and running.record.attempt >= record.attempt:
            problem = (f"a request with id {record.id!r} is running already", "request_id")
        elif not record.prompt_ids:
            problem = ("the prompt must hold at least one token", "prompt")
        elif wanted > limit:
            problem = (f"the prompt has {length} tokens, but at most {limit} fit the model's length and the KV cache", "prompt")
        elif params.max_tokens is not None and params.min_tokens > params.max_tokens:
            problem = (f"must be at most max_tokens ({params.max_tokens})", "min_tokens")
        if problem is not None:
            logger.info("%s is refused: %s: %s", record.id, problem[1], problem[0])
            return Delta(record.id, record.attempt, finish_reason="error", error=problem[0], error_param=problem[1])
        # A request that another core handed over was accepted there.
        full = self._queue_full(length) if not record.attempt else None
        if full is not None:
            logger.info("%s is refused: %s", record.id, full)
            return Delta(record.id, record.attempt, finish_reason="error", error=full, refused=True)
        if params.max_tokens is not None and len(record.output_ids) >= params.max_tokens:
            return Delta(record.id, record.attempt, finish_reason="length")
        return None

    def _queue_full(self, length: int) -> str | None:
        """Returns why a request of `length` tokens cannot wait too, or None. Free batch slots go to requests that wait already."""
        count, tokens = len(self.waiting), self.waiting.num_tokens
        if count >= self.config.max_num_waiting + len(self._free_slots):
            return f"{count} requests are waiting already"
        if tokens and tokens + length > self.config.max_num_waiting_tokens:
            return f"{tokens} tokens are waiting already, and {length} more are too many"
        return None

    def add(self, record: EngineRequest) -> None:
        """Queues a request that `answer_at_once` has no answer to. A newer attempt replaces an older one."""
        self.abort(record.id)
        root = chain_root(None if record.pooling is None else record.pooling.adapter, record.cache_salt)
        longest = min(self.config.max_model_len, self.kv.max_tokens)
        sequence = self.kv.new_sequence(root)
        sequence.salt = record.cache_salt or None
        request = RequestState(record, sequence, longest, self.config.eos_token_ids)
        parent = self._prefixes.parent(request)
        if parent is not None and parent.computed < request.num_prompt:
            request.gates.add(Gate.FORK_PARENT)
            self._forks.setdefault(parent.record.id, []).append(request)
        self.requests[record.id] = request
        self.waiting.add(request)
        self._lead.add(request)
        self.drafter.on_added(request)
        self._grammars.start(request)
        if not self.kv.prefix_caching or not request.reads_prefix_cache or self._hashing.start(request):
            self.offload.on_new_request(request)

    def abort(self, request_id: str) -> None:
        """Ends a request at once: its blocks are free now, its results in flight are discarded. Unknown ids are ignored."""
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(request)

    def hand_over(self) -> list[Delta]:
        """Ends all requests here, with deltas by which another core is to continue them."""
        return self.end_all(MOVED)

    def end_all(self, reason: str) -> list[Delta]:
        """Ends all requests here, with `reason` as their `finish_reason`. Results in flight are discarded."""
        requests = list(self.requests.values())
        for request in requests:
            logger.info("%s ends here (%s) with %d tokens", request.record.id, reason, len(request.tokens))
            self._finish(request)
        return [Delta(r.record.id, r.record.attempt, finish_reason=reason) for r in requests]

    @property
    def has_work(self) -> bool:
        return bool(self.requests) or bool(self._in_flight)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def waits_for_events(self) -> bool:
        """True while each request waits for what planning does not bring about."""
        return all(Gate.HASHING not in r.gates and not EVENT_GATES.isdisjoint(r.gates) for r in self.requests.values())

    def open_grammar_gates(self) -> list[Delta]:
        """Lets requests start whose grammars are built; returns the last deltas of those that end here."""
        deltas = []
        for request, error in self._grammars.take_ready():
            constraint = request.constraint
            if error is not None:
                logger.info("%s ends, its grammar cannot be built: %s", request.record.id, error)
                deltas.append(request.failed(error))
                self._finish(request)
            elif constraint is not None and constraint.is_finished:  # the empty output is the only one
                deltas.append(self._finish_delta(request, Delta(request.record.id, request.record.attempt, finish_reason="stop")))
        return deltas

    # ---- planning ----

    def schedule(self) -> StepPlan | None:
        """Returns the next step, or None when nothing can run now (all waits for steps in flight, or there is no work)."""
        builder = StepBuilder(self._step_id, self.epoch, self.config.max_num_batched_tokens, self.config.stages)
        self.offload.prepare_store(len(self.running), idle=not self.has_work)
        for request in self._hashing.advance(self.waiting):
            self.offload.on_new_request(request)
        trial = bool(self._suspects) and self._trial not in self._in_flight
        if trial and self._trial != self._step_id - 1:  # other requests have every second step
            self._plan_trial(builder)
        if not builder.requests:
            self._plan_step(builder)
        if not builder.requests and trial:
            self._plan_trial(builder)
        if not builder.requests:
            return None
        self._step_id += 1
        self._in_flight[builder.step_id] = builder
        plan = builder.plan(self._freed_slots)
        self._freed_slots = []
        return plan

    def _plan_step(self, builder: StepBuilder) -> None:
        """Plans decodes first, then prompts: running prompts share with new requests."""
        preempted = self.stats.preemptions_total
        prompts: list[RequestState] = []
        self._plan_running(builder, prompts)
        self._plan_prompts(builder, prompts, admits=self.stats.preemptions_total == preempted)

    def _plan_running(self, builder: StepBuilder, prompts: list[RequestState]) -> None:
        """Adds every decoding request's next token, with drafts; requests with more to compute go to `prompts`.

        With several pipeline stages a step takes only its share of the decodes. So other stages have steps of their own, and the
        first one has its next step while results travel.
        """
        block_size = self.kv.block_size
        by_priority = self.config.policy == "priority"
        room = -(-len(self.running) // self.config.depth)
        drafts = self.drafter.active
        if drafts:
            self.drafter.begin_step(len(self.running))
        for request in sorted(self.running, key=lambda r: r.order) if by_priority else tuple(self.running):
            end = len(request.tokens) + request.pending
            todo = end - request.planned
            if request.gates or request.status is not RequestStatus.RUNNING:  # a request before it may have taken its blocks
                continue
            if todo > 1:
                prompts.append(request)
            elif todo == 1 and end < request.length_limit and builder.token_budget:
                if self.config.stages > 1 and (request.pending or len(builder.requests) >= room):
                    continue
                if drafts and request.pending and (self.drafter.waits(request) or not self._knows_state(request)):
                    continue
                if end > request.blocks.num_blocks * block_size and not self._grow(builder, request, end):
                    continue
                self._snapshot(builder, request)
                builder.add_row(request, 1, self._draft(builder, request, end) if drafts else ())

    def _draft(self, builder: StepBuilder, request: RequestState, end: int) -> Sequence[int]:
        """Returns drafts for a request whose row ends at `end` without any: as many as there are tokens and blocks to spare."""
        rows = min(self.config.max_num_seqs, len(self.running) + len(self.waiting))
        samples = self.config.max_num_samples - rows - len(builder.drafts)
        tokens = builder.token_budget - max(1, len(self.running) - len(builder.requests))
        to_snapshot = self.kv.tokens_to_stop(request.blocks, request.planned) - 1
        most = min(samples, tokens, request.length_limit - end - 1, to_snapshot)
        drafts = self.drafter.propose(request, most) if most > 0 else ()
        room = request.blocks.num_blocks * self.kv.block_size - end
        if len(drafts) <= room:
            return drafts
        try:
            self._take_blocks(builder, request, end + len(drafts))
        except OutOfBlocks:
            return drafts[:room]
        return drafts

    def _plan_prompts(self, builder: StepBuilder, prompts: list[RequestState], *, admits: bool) -> None:
        """Gives prompts the rest of the budget: first those that lead, in most steps."""
        if len(self.running) > len(prompts):
            builder.token_budget = self._prefill.tokens(builder.token_budget)
        if self._lead.begins_step():
            admits = self._share(builder, [r for r in prompts if self._lead.has(r)], admits=admits, leading=True)
            prompts = [r for r in prompts if not self._lead.has(r)]
        self._share(builder, prompts, admits=admits)

    def _share(self, builder: StepBuilder, prompts: list[RequestState], *, admits: bool, leading: bool = False) -> bool:
        """Shares the budget among prompts. Running ones also get what waiting ones do not use.

        With `leading` none but such are admitted. Returns whether others may be admitted after it.
        """
        wanted = [request.todo for request in prompts]
        waits = admits and len(self.waiting) > 0 and len(self._free_slots) > 0
        reserved = sum(shares(builder.token_budget, [*wanted, builder.token_budget if waits else 0], self.kv.block_size)[:-1])
        builder.token_budget -= reserved
        admits = admits and self._admit_waiting(builder, leading=leading)
        builder.token_budget += reserved
        for request, share in zip(prompts, shares(builder.token_budget, wanted, self.kv.block_size), strict=True):
            self._plan_prompt(builder, request, share)
        return admits

    def _plan_prompt(self, builder: StepBuilder, request: RequestState, most: int) -> None:
        """Adds the next prefill chunk of a request with several tokens to compute, at most `most`."""
        count = min(request.todo, most, self.kv.tokens_to_stop(request.blocks, request.planned))
        if count and request.status is RequestStatus.RUNNING and self._grow(builder, request, request.planned + count):
            self._snapshot(builder, request)
            builder.add_row(request, count)

    def _knows_state(self, request: RequestState) -> bool:
        """Returns whether a snapshot of the state that is wanted now would be of the length that its name will say.

        With drafts in flight nobody knows that length yet, nor the chunk that the row begins in.
        """
        samples = [count for builder in self._in_flight.values() for _, count in builder.rows_of(request)]
        unsure = sum(max(0, count - 1) for count in samples)
        if not self.kv.in_one_attention_chunk(request.planned - unsure, request.planned):
            return False
        return not unsure or not self.kv.wants_snapshot(request.blocks, request.planned)

    def _snapshot(self, builder: StepBuilder, request: RequestState) -> None:
        """Copies the state with which the request's row begins: from what came from a tier, and to a snapshot if one is wanted."""
        if self.kv.state_blocks:
            builder.copies += self.kv.take_restores(request.blocks)
            builder.copies += self.kv.take_snapshot(request.blocks, request.planned, len(self.running) * len(self.kv.groups))

    def _admit_waiting(self, builder: StepBuilder, *, leading: bool) -> bool:
        """Starts waiting requests in their order, until token budget, batch slots or blocks end. Closed gates are skipped.

        Returns False where one that is first has to wait for blocks.
        """
        if not builder.token_budget or not self._free_slots:
            return True
        for request in [r for r in self.waiting if not r.gates and (not leading or self._lead.has(r))]:
            if not builder.token_budget or not self._free_slots:
                break
            if not self._admit(builder, request):
                return False
        return True

    def _admit(self, builder: StepBuilder, request: RequestState) -> bool:
        """Starts a request, or skips one that waits for offloaded chunks. Returns False when no further request may be tried."""
        if self.config.whole_prompts and len(request.tokens) > builder.token_budget:
            return False
        prefix = self._prefixes.find(request)
        if prefix is None:
            return True
        length = len(request.tokens) + (self.kv.block_size if prefix.forked else 0)  # a fork gets a copy of the last block
        headroom = len(self.running) * len(self.kv.groups)
        if not self.kv.admit(request.blocks, prefix.tables, length, headroom, prefix.hit, prefix.external):
            self._log_put_off(request, length, headroom)
            return False
        if request.put_off_run == request.run:
            logger.info("%s starts after it was put off", request.record.id)
        self._take_slot(request)
        request.planned = request.computed = request.cached_tokens = prefix.length
        if request.reads_prefix_cache and not request.run:
            self._count_hits(request, prefix)
        if prefix.length >= request.num_prompt:
            self._open_forks(request)
        if prefix.external:
            self._load_prefix(builder, request, prefix)
        else:
            self._plan_first(builder, request, prefix)
        return True

    def _log_put_off(self, request: RequestState, length: int, headroom: int) -> None:
        """Logs once a run that a request waits for blocks: it may be first in the queue for many steps."""
        if request.put_off_run != request.run:
            request.put_off_run = request.run
            text = "%s is put off: up to %d blocks wanted for %d tokens and %d left for others to grow into, %d free"
            logger.info(text, request.record.id, self.kv.blocks_for(length), length, headroom, self.kv.num_available)

    def _load_prefix(self, builder: StepBuilder, request: RequestState, prefix: PrefixHit) -> None:
        """Orders the loads of a prefix; the request is in no step until its blocks have come.

        The step that is being planned may still copy a snapshot from some of them.
        """
        self.kv.grow_for_load(request.blocks, prefix.length)
        hit = prefix.hit // self.kv.block_size
        after = self._step_id if builder.copies else self._step_id - 1
        self.offload.prepare_load(request, hit, prefix.length, after)

    def _plan_first(self, builder: StepBuilder, request: RequestState, prefix: PrefixHit) -> None:
        """Adds the request's first prefill chunk, after the prefix that it found on the device."""
        sequence = request.blocks
        if prefix.forked:
            sequence.cached_blocks = sequence.found_blocks = prefix.hit // self.kv.block_size
            builder.copies.extend(self.kv.make_writable(sequence, prefix.hit))
        sequence.stored_chunks = prefix.hit // CHUNK
        builder.copies.extend(self.kv.take_restores(sequence))
        count = min(len(request.tokens) - prefix.hit, builder.token_budget, self.kv.tokens_to_stop(sequence, prefix.hit))
        self.kv.grow(sequence, prefix.hit + count)
        builder.add_row(request, count)

    def _count_hits(self, request: RequestState, prefix: PrefixHit) -> None:
        self.stats.prefix_queries_total += len(request.tokens)
        self.stats.prefix_hits_total += prefix.hit
        self.stats.external_queries_total += self.offload.count_lookup(request, prefix.hit // self.kv.block_size, prefix.length)
        self.stats.external_hits_total += prefix.external

    # ---- blocks ----

    def _grow(self, builder: StepBuilder, request: RequestState, num_tokens: int) -> bool:
        """Takes the blocks for `num_tokens`, preempting the least important requests while there are too few."""
        while True:
            try:
                self._take_blocks(builder, request, num_tokens)
                return True
            except OutOfBlocks as missing:
                if self._blocks_come_soon:
                    return False
                victim = self._victim()
                if victim in builder.requests:
                    return False
                swapped = self.offload.prepare_swap(victim)
                self._preemptions.add(victim, request, missing, swapped=swapped)
                self._preempt(victim)
                if victim is request:
                    return False

    def _take_blocks(self, builder: StepBuilder, request: RequestState, num_tokens: int) -> None:
        """Takes the blocks for `num_tokens`. Raises OutOfBlocks."""
        for group, blocks in enumerate(self.kv.grow(request.blocks, num_tokens)):
            if request.entered:
                builder.appends.append(BlockAppend(request.slot, group, blocks))

    @property
    def _blocks_come_soon(self) -> bool:
        """True if blocks become free as soon as they are copied."""
        return any(self.kv.pool.refs[block] == 1 for blocks in self.offload.pinned_blocks() for block in blocks)

    def _victim(self) -> RequestState:
        return self.running[-1] if self.config.policy == "fcfs" else max(self.running, key=lambda r: r.order)

    def _preempt(self, request: RequestState) -> None:
        """Moves a request back to the queue; it will compute its tokens again, except for a prefix hit."""
        self._leave_slot(request, resumes=True)
        request.status = RequestStatus.WAITING
        request.planned = request.computed = request.pending = 0
        self.waiting.put_back(request)
        self.offload.on_request_preempted(request)
        self.stats.preemptions_total += 1

    # ---- batch slots ----

    def _take_slot(self, request: RequestState) -> None:
        self.waiting.remove(request)
        self.offload.on_request_finished(request)
        self.running.append(request)
        request.status = RequestStatus.RUNNING
        request.slot = self._free_slots.pop()

    def _leave_slot(self, request: RequestState, *, resumes: bool = False) -> None:
        self.running.remove(request)
        self.offload.on_request_stopped(request)
        self.kv.release(request.blocks, resumes=resumes)
        self._free_slots.append(request.slot)
        self._freed_slots.append(request.slot)
        request.slot = -1
        request.run += 1
        request.entered = False
        request.gates.discard(Gate.KV_LOAD)
        request.awaited.clear()

    # ---- results ----

    def update(self, result: StepResult) -> list[Delta]:
        """Applies a step's result; returns its requests' deltas."""
        builder = self._in_flight.pop(result.step_id, None)
        if builder is None or result.epoch != builder.epoch:
            logger.warning("a stale result was refused: step %d of epoch %d", result.step_id, result.epoch)
            return []
        self.stats.steps_total += 1
        self.stats.kernels_compiled_total += result.compiled
        self.stats.steps_not_recorded = result.eager
        self.stats.library_steps_total += result.by_library
        self.offload.on_step_finished(builder.step_id, sum(builder.num_tokens), result.seconds)
        if result.error is not None:
            return self._on_step_failure(builder, result.error)
        self._prefill.observe(builder.rows_without_drafts, result.seconds)
        if self.drafter.active and builder.decodes_only:
            self.drafter.on_step(sum(builder.num_tokens), result.seconds)
        return self._take_rows(builder, result)

    def _take_rows(self, builder: StepBuilder, result: StepResult) -> list[Delta]:
        """Applies the results of a step's rows, but for those of requests that have left their slot since."""
        deltas: list[Delta] = []
        drafter = self.drafter if self.drafter.active else None
        tokens, at, unmatched = unpack_tokens(result.tokens).tolist(), 0, frozenset(result.unmatched)
        for row, (request, run, start, count, drafts) in enumerate(builder.rows()):
            before, at = at, at + result.counts[row]
            if request.run != run:
                continue
            sampled = tokens[before:at]
            extras = result.extras.get(row, NO_EXTRAS)
            delta = request.apply(sampled, start, drafts, extras)
            if drafter is not None and sampled and delta is not None:
                guesses = drafter.on_sampled(request, 0 if row in unmatched else drafts, sampled)
                delta.num_draft_tokens, delta.num_accepted_tokens = guesses, len(sampled) - 1 if guesses else 0
            if extras.error is None:
                self._confirm(request, len(request.tokens) - 1 if sampled else start + count)
            else:
                self._forget_computed(request)
            if delta is not None:
                deltas.append(self._finish_delta(request, delta))
        return deltas

    def take_masks(self) -> list[StepMasks]:
        """Returns the masks that steps in flight wait for, as far as it is known what they follow."""
        in_flight = self._in_flight.values()
        return take_due_masks(in_flight) if any(builder.masked for builder in in_flight) else []

    def _confirm(self, request: RequestState, computed: int) -> None:
        """Marks a request's tokens up to `computed` as cached: other requests may use them."""
        prompt_done = request.computed < request.num_prompt <= computed
        request.computed = computed
        sequence = request.blocks
        if computed // self.kv.block_size > sequence.cached_blocks:
            self.kv.cache_blocks(sequence, request.tokens, computed)
            self.offload.on_blocks_cached(request)
        if sequence.state.copied:
            self.offload.on_snapshots_cached(request, self.kv.name_snapshots(sequence, request.tokens, computed))
        self.kv.free_behind_window(sequence, computed)
        if prompt_done:
            self._open_forks(request)
        if Gate.SUSPECT in request.gates and computed >= request.failed_at:
            self._suspects.clear(request)

    def _forget_computed(self, request: RequestState) -> None:
        """Removes a failed row's blocks from the cache: they may be wrong too."""
        chunks = self.kv.evict_own_blocks(request.blocks)
        self.offload.invalidate(chunks)

    def _open_forks(self, parent: RequestState) -> None:
        for request in self._forks.pop(parent.record.id, ()):
            request.gates.discard(Gate.FORK_PARENT)

    def _finish_delta(self, request: RequestState, delta: Delta) -> Delta:
        """Completes a request's delta; ends the request if it is the last one."""
        self.stats.generated_tokens_total += len(delta.tokens)
        delta.queue_seconds, request.queue_seconds = request.queue_seconds, None
        if not request.answered:
            request.answered = True
            delta.cached_tokens = request.cached_tokens
            self.stats.prompt_tokens_total += request.num_prompt
        if delta.finish_reason == "error":
            logger.info("%s ends with %d tokens: %s", request.record.id, len(request.tokens), delta.error)
        if delta.finish_reason is not None:
            self._finish(request)
        return delta

    def _finish(self, request: RequestState) -> None:
        if request.status is RequestStatus.RUNNING:
            self._leave_slot(request)
        else:
            self.waiting.remove(request)
            self._hashing.finish(request)
            request.run += 1
            self.offload.on_request_finished(request)
        request.status = RequestStatus.FINISHED
        self._lead.remove(request)
        self.drafter.on_finished(request)
        self._grammars.finish(request)
        self._suspects.clear(request)
        del self.requests[request.record.id]
        self._open_forks(request)

    def on_transfer_done(self, done: TransferDone) -> None:
        """Applies the outcome of a transfer order."""
        for request in self.offload.complete(done):
            logger.info("%s computes its prompt: chunks of it that a tier had did not come", request.record.id)
            self._preempt(request)
            request.skips_tiers = True

    def reset_prefix_cache(self) -> None:
        """Drops cached blocks that no running request uses, on the device and in the CPU tier."""
        self.reset_device_cache()
        self.offload.reset()

    def reset_device_cache(self) -> None:
        """Drops cached blocks of the device that no running request uses. The tiers' chunks stay."""
        self.kv.pool.evict_free_blocks()

    # ---- faults ----

    def _on_step_failure(self, builder: StepBuilder, error: str) -> list[Delta]:
        """Handles a step that failed as a whole. Its only request ends; several run again by halves, until one fails alone."""
        current = [
            (request, (len(request.tokens) - 1 if start == FOLLOWS else start) + count)
            for request, run, start, count, _ in builder.rows()
            if request.run == run
        ]
        if len(builder.requests) == 1:
            for request, _ in current:
                logger.info("%s ends: step %d, which ran it alone, failed: %s", request.record.id, builder.step_id, error)
                self._finish(request)
            return [Delta(r.record.id, r.record.attempt, finish_reason="error", error=error) for r, _ in current]
        for request, end in reversed(current):
            logger.info(
                "%s is computed again: step %d, which it was part of, failed: %s", request.record.id, builder.step_id, error
            )
            request.failed_at = end
            request.skips_tiers = True
            self._preempt(request)
        self._suspects.add([request for request, _ in current])
        return []

    def _plan_trial(self, builder: StepBuilder) -> None:
        """Plans a step of suspects alone, as many of the group as fit. Streams wait for it as for any other.

        Others that were being tried, when a later step in flight failed too, give their blocks back: they cannot go on.
        """
        for request in self._suspects.others:
            if request.status is RequestStatus.RUNNING:
                self._preempt(request)
        if len(self.running) > len(self._suspects.tried):
            builder.token_budget = self._prefill.tokens(builder.token_budget)
        for request in tuple(self._suspects.tried):
            if not builder.token_budget:
                break
            if request.status is RequestStatus.RUNNING:
                self._plan_prompt(builder, request, builder.token_budget)
            elif self._free_slots:
                self._admit(builder, request)
        if builder.requests:
            self._trial = builder.step_id

    # ---- reports ----

    def snapshot(self) -> Stats:
        self.stats.running = len(self.running)
        self.stats.waiting = len(self.waiting)
        self.stats.kv_blocks_used = self.kv.pool.num_used
        self.stats.step_tokens = self._prefill.tokens(self.config.max_num_batched_tokens)
        self.stats.tiers = dict(self.offload.stats)
        return self.stats

    def check_integrity(self) -> None:
        """Asserts that blocks, batch slots and requests agree; cheap enough for idle moments."""
        self.offload.check_integrity({request.record.id for request in self.waiting})
        pinned = self.offload.pinned_blocks()
        self.kv.pool.check_integrity([*(table for r in self.running for table in r.blocks.held), *pinned])
        assert self.kv.reserved == sum(r.blocks.reserved for r in self.running)
        assert len(self._free_slots) + len(self.running) == self.config.max_num_seqs
        assert len(self.requests) == len(self.running) + len(self.waiting)
        for request in self.running:
            in_flight = [row for builder in self._in_flight.values() for row in builder.rows_of(request)]
            tokens, samples = (sum(column) for column in zip(*in_flight, strict=True)) if in_flight else (0, 0)
            assert request.computed <= request.planned <= request.computed + tokens, "planned tokens are computed or in flight"
            assert request.pending == samples, "what steps in flight may sample"
            assert request.blocks.cached_blocks * self.kv.block_size <= request.computed, "nothing has a name that is not confirmed"
        self._suspects.check_integrity()
        assert self._grammars.requests == {r for r in self.waiting if Gate.GRAMMAR in r.gates}
        assert all(self.requests.get(r.record.id) is r for r in self._suspects.tried)
        assert self._forks.keys() <= self.requests.keys()
