"""The engine core: one scheduler and its executor, stepped by whoever owns it."""

import time
from dataclasses import replace
from pathlib import Path

from starling_engine.config import EngineConfig
from starling_engine.delta import MOVED, Delta
from starling_engine.executor.base import Executor
from starling_engine.kv.events import EventLog
from starling_engine.kv.manager import KVManager
from starling_engine.kv_offload.manager import OffloadManager
from starling_engine.kv_offload.sizes import chunk_bytes, host_slots
from starling_engine.model_config.config import load_model_config
from starling_engine.request import EngineRequest
from starling_engine.scheduler.scheduler import Scheduler
from starling_engine.topology.epoch import (
    CHECKPOINT,
    PEERS,
    Abandon,
    Balance,
    Commit,
    EpochAnswer,
    EpochOrder,
    EpochPlan,
    Prepare,
    Prepared,
    Rearranged,
    Switched,
)
from starling_engine.topology.layout import EpochMembership
from starling_engine.worker.report import WorkerReport

COLLECT_SECONDS = 0.2
"""How long a step may keep the core from answering pings."""
MOVE_SECONDS = 0.005
"""How long moves between tiers may keep it from new requests, when no step is in flight."""


class EngineCore:
    """`executor` must be ready; `report` is what it said of its memory."""

    def __init__(self, config: EngineConfig, executor: Executor, report: WorkerReport) -> None:
        self.membership = EpochMembership.first(config.worker.layout)
        self.executor = executor
        self.ledger = report.ledger
        self.start_seconds = report.seconds
        asynchronous = report.async_scheduling if config.async_scheduling is None else config.async_scheduling
        self.depth = config.worker.layout.depth(asynchronous=asynchronous)
        settings = config.scheduler
        target = report.step_target_ms if settings.step_target_ms is None else settings.step_target_ms
        # With several stages a stream has a token when each of the steps in flight has run.
        steps = self.depth if settings.stages > 1 else 1
        settings = replace(settings, step_target_ms=-(-target // steps), depth=self.depth)
        self.events = EventLog(report.groups) if config.kv_events is not None else None
        """What has been cached and removed, where somebody is told."""
        kv = KVManager(
            report.groups,
            report.ledger.num_blocks,
            prefix_caching=settings.prefix_caching,
            chunk=self.depth * settings.max_num_batched_tokens,
            log=self.events,
        )
        self.scheduler = Scheduler(settings, kv, self.membership.epoch, _offload(config, kv))
        self.taking = not config.worker.lockstep
        """Whether it takes requests: not while it stands by for an epoch, or leaves one."""
        self._balances: dict[int, float] = {}
        """By stage."""
        self._busy = False
        self._next: EpochPlan | None = None
        self._leaving: Commit | None = None
        """Held back until no step is in flight: a rank that has left can run none."""

    def add(self, request: EngineRequest) -> Delta | None:
        """Queues a request; returns the answer when there is one at once."""
        if not self.taking:
            return Delta(request.id, request.attempt, finish_reason=MOVED)
        answer = self.scheduler.answer_at_once(request)
        if answer is None:
            self.scheduler.add(request)
        return answer

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def moving(self) -> bool:
        """Whether the tiers have something to tell, now or later."""
        return self.scheduler.offload is not None and self.scheduler.offload.moving

    @property
    def moved_soon(self) -> bool:
        """Whether they have, unless one of them hangs."""
        return self.scheduler.offload is not None and self.scheduler.offload.answers_soon

    @property
    def uses_device(self) -> bool:
        """Whether steps or the tiers need what is in the device's memory."""
        return self.has_work or (self.scheduler.offload is not None and self.scheduler.offload.uses_device)

    def step(self) -> list[Delta]:
        """Keeps up to `depth` steps in flight and takes in the oldest result, if it has come within COLLECT_SECONDS."""
        self._take_moves(0.0)
        self._look_outside()
        while self.scheduler.num_in_flight < self.depth and (plan := self.scheduler.schedule()) is not None:
            self.executor.submit(plan)
            self._busy = True
        self._order_moves()
        if not self.scheduler.num_in_flight:
            self._rest()
            if self.scheduler.has_work and self.moving:
                self._take_moves(MOVE_SECONDS)
            return []
        result = self.executor.collect(COLLECT_SECONDS)
        return self.scheduler.update(result) if result is not None else []

    def leave(self, seconds: float) -> None:
        """Ends what is open, and runs no step any more. What was put off is written to the tiers outside first, as far as that goes
        in so many seconds.
        """
        self.scheduler.end_all(MOVED)
        offload, end = self.scheduler.offload, time.monotonic() + seconds
        while offload is not None and offload.writing and time.monotonic() < end:
            offload.begin_step(0, idle=True)
            self._order_moves()
            self._take_moves(MOVE_SECONDS)

    def _rest(self) -> None:
        if self._busy:
            self.executor.idle()
            self._busy = False
        if self._leaving is not None:
            self.executor.order(self._leaving)
            self._leaving = None

    # ---- tiers ----

    def _order_moves(self) -> None:
        offload = self.scheduler.offload
        if offload is not None and (orders := offload.take_orders()):
            self.executor.move(orders)

    def _take_moves(self, timeout: float) -> None:
        """All that has moved; waits for the first of it at most `timeout` seconds, for when nothing else is to be done."""
        if self.moving:
            for done in self.executor.moved(timeout):
                self.scheduler.move(done)
            self._order_moves()

    def _look_outside(self) -> None:
        offload = self.scheduler.offload
        if offload is not None and (standing := self.executor.standing()) is not None:
            offload.counts.stand(standing.far)

    # ---- epochs ----

    def order(self, order: EpochOrder) -> list[Delta]:
        """Passes an order on to the workers. A core that is to leave hands its requests over first."""
        match order:
            case Prepare(epoch):
                self._next = epoch
            case Abandon():
                self._next = None
            case Commit() if self._next is not None and self._next.dp is None:
                self.taking, self._leaving = False, order
                return self.scheduler.hand_over()
        self.executor.order(order)
        return []

    def answers(self) -> list[EpochAnswer]:
        """What the workers have answered; a switch changes the membership."""
        answers, stats = self.executor.answers(), self.scheduler.stats
        for answer in answers:
            if isinstance(answer, Prepared):
                stats.epoch_peer_bytes_total += answer.loaded[PEERS].bytes if PEERS in answer.loaded else 0
                stats.epoch_checkpoint_bytes_total += answer.loaded[CHECKPOINT].bytes if CHECKPOINT in answer.loaded else 0
            if isinstance(answer, Switched):
                self._switch(answer.number)
        return answers

    def count_moves(self) -> list[Rearranged]:
        """Takes what workers tell of their experts into the counters; where those lie now."""
        stats, moved = self.scheduler.stats, []
        for told in self.executor.balances():
            if isinstance(told, Balance):
                self._balances[told.stage] = told.now
                stats.eplb_balance = min(self._balances.values())  # of the worst stage
                continue
            moved.append(told)
            stats.eplb_experts_moved_total += told.moved
            stats.eplb_seconds_total += told.seconds
            if told.complete:
                stats.eplb_rearrangements_total += 1
                stats.eplb_balance_before, stats.eplb_balance_after = told.before, told.after
        return moved

    def _switch(self, number: int) -> None:
        plan, self._next = self._next, None
        assert plan is not None and plan.number == number, "only what was ordered is switched to"
        self.scheduler.epoch = number
        self.taking = plan.dp is not None
        own = replace(self.membership.layout, data=1).world_size
        workers = tuple(member * own + rank for member in plan.members for rank in range(own))
        self.membership = EpochMembership(number, replace(self.membership.layout, data=plan.data), workers)


def _offload(config: EngineConfig, kv: KVManager) -> OffloadManager | None:
    worker = config.worker
    if worker.tiers is None:
        return None
    model = load_model_config(Path(worker.model_path))
    size = chunk_bytes(model, worker) * worker.layout.world_size
    return OffloadManager(kv, worker.tiers, host_slots(model, worker), size, config.scheduler.preempt)
