"""The engine core: one scheduler and its executor, stepped by the process that owns it."""

import logging
import time
from dataclasses import replace
from pathlib import Path

from starling_engine.config import EngineConfig
from starling_engine.core.epochs import CoreEpochs
from starling_engine.core.followers import Followers
from starling_engine.core.messages import CoreCommand, FrontendCall, Outbox
from starling_engine.core.sleeper import CoreSleeper
from starling_engine.delta import MOVED, Delta
from starling_engine.executor.base import Executor
from starling_engine.ipc.wakeup import Wakeup
from starling_engine.kv.events import EventLog
from starling_engine.kv.manager import KVManager
from starling_engine.kv.snapshots import SnapshotSpacing
from starling_engine.kv_offload.base import OffloadManager
from starling_engine.kv_offload.manager import TieredOffload
from starling_engine.kv_offload.orders import TierStatus, TransferChunks, TransferDone
from starling_engine.kv_offload.secondary.base import CHUNK
from starling_engine.kv_offload.sizes import chunk_bytes, host_slots
from starling_engine.model_config.config import load_model_config
from starling_engine.request import EngineRequest
from starling_engine.scheduler.grammar_builds import GrammarBuilds
from starling_engine.scheduler.scheduler import Scheduler
from starling_engine.sleep import SLEEP_EXCLUDES_DP_SYNC, MemoryReply, Sleep, Slept, WakeUp
from starling_engine.topology.epoch import Abandon, Balance, Commit, Prepare, Prepared, Rearranged, Switched, Unprepared
from starling_engine.topology.layout import EpochMembership
from starling_engine.worker.commands import Idle, Reply
from starling_engine.worker.messages import WorkerReport

logger = logging.getLogger("starling.core")

COLLECT_SECONDS = 0.2
"""Longest time that a step may keep the core from answering pings."""
TRANSFER_SECONDS = 0.005
"""Longest time that transfers may keep it from new requests, when no step is in flight."""


class EngineCore:
    """`executor` must be ready; `report` is its report. Messages that come of steps and replies for frontends go to `outbox`."""

    def __init__(self, config: EngineConfig, executor: Executor, report: WorkerReport) -> None:
        membership = EpochMembership.first(config.worker.layout)
        self.executor = executor
        self.ledger = report.ledger
        self.store_port = report.store_port
        self.start_seconds = report.seconds
        asynchronous = report.async_scheduling if config.async_scheduling is None else config.async_scheduling
        self.depth = config.worker.layout.depth(asynchronous=asynchronous)
        settings = config.scheduler
        target = report.step_target_ms if settings.step_target_ms is None else settings.step_target_ms
        # With several stages a stream has a token when each of the steps in flight has run.
        steps = self.depth if settings.stages > 1 else 1
        settings = replace(settings, step_target_ms=-(-target // steps), depth=self.depth, own_drafts=report.makes_drafts)
        kv = KVManager(
            report.groups,
            report.ledger.num_blocks,
            prefix_caching=settings.prefix_caching,
            max_in_flight=self.depth * settings.max_num_batched_tokens,
            events=EventLog(report.groups, report.state, published=config.kv_events is not None),
            state=report.state,
            spacing=SnapshotSpacing(unit=CHUNK) if config.worker.tiers is not None else SnapshotSpacing(),
        )
        self.wakeup = Wakeup()
        """Called when something has come for the core that is no message."""
        grammars = GrammarBuilds(config.vocabulary, self.wakeup.set)
        self.scheduler = Scheduler(settings, kv, membership.epoch, _offload(config, kv), grammars=grammars)
        self.outbox = Outbox()
        self.followers = Followers(kv, self.scheduler.offload, self.outbox)
        self._dp_sync = config.worker.dp_sync
        self.epochs = CoreEpochs(membership, self.scheduler, executor, self.outbox, taking=not self._dp_sync)
        self.sleeper = CoreSleeper(self.scheduler, executor, self.outbox, lambda: self.uses_device)
        self._balances: dict[int, float] = {}
        """EPLB balance by pipeline stage."""
        self._has_stepped = False
        """True when a plan was submitted since the ranks were last sent Idle."""

    def add(self, request: EngineRequest) -> Delta | None:
        """Queues a request; returns the answer when there is one at once."""
        if not self.epochs.taking:
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
    def can_sleep(self) -> bool:
        """True while nothing goes on before a message, a reply of the ranks or `wakeup` comes: all requests wait for one.

        False where there are requests and transfers: a step waits for an outcome of these itself, for milliseconds.
        """
        return not self.scheduler.num_in_flight and self.scheduler.waits_for_events and not self._awaits_transfers

    @property
    def has_pending_transfers(self) -> bool:
        """True while an outcome of a transfer is to come, now or later."""
        return self.scheduler.offload.has_pending_work

    @property
    def _awaits_transfers(self) -> bool:
        return self.has_work and self.has_pending_transfers

    @property
    def replies_soon(self) -> bool:
        """True while a reply of the ranks is worth polling for."""
        return self.epochs.busy or self.sleeper.busy or self.has_pending_transfers

    @property
    def uses_device(self) -> bool:
        """True while steps or transfers need what is in the device's memory."""
        return self.has_work or self.scheduler.offload.uses_device

    def step(self) -> list[Delta]:
        """Keeps up to `depth` steps in flight; returns the deltas of the oldest, if it ends within COLLECT_SECONDS."""
        self.wakeup.clear()
        self._handle_replies()
        deltas = self.scheduler.open_grammar_gates()
        while self.scheduler.num_in_flight < self.depth and (plan := self.scheduler.schedule()) is not None:
            self.executor.submit(plan)
            self._has_stepped = True
        self._send_transfers()
        self._send_masks()
        deltas += self._collect()
        self._send_masks()  # of steps that waited for these results
        self.sleeper.step()
        return deltas

    def handle(self, command: CoreCommand, caller: FrontendCall) -> list[Delta]:
        """Begins to carry out a frontend's command; returns the last deltas of requests that end for it."""
        match command:
            case Sleep() | WakeUp() if self._dp_sync:
                self.outbox.answer(caller, Slept(refused=SLEEP_EXCLUDES_DP_SYNC))
            case Sleep() | WakeUp():
                return self.sleeper.handle(command, caller)
            case Prepare() | Commit() | Abandon() if self._dp_sync:
                return self.epochs.handle(command, caller)
            case _:
                logger.warning("%s is for cores that step with others, which this one does not", type(command).__name__)
        return []

    def leave(self, seconds: float) -> None:
        """Ends open requests, and runs no step any more.

        Chunks that wait to be written back are written first, as many as that goes in `seconds`.
        """
        self.scheduler.end_all(MOVED)
        offload, end = self.scheduler.offload, time.monotonic() + seconds
        while offload.has_pending_work and time.monotonic() < end:
            offload.prepare_store(0, idle=True)
            self._send_transfers()
            self._handle_replies(TRANSFER_SECONDS)

    def _collect(self) -> list[Delta]:
        if self.scheduler.num_in_flight:
            result = self.executor.collect(COLLECT_SECONDS)
            return self.scheduler.update(result) if result is not None else []
        self._on_idle()
        if self._awaits_transfers:
            self._handle_replies(TRANSFER_SECONDS)
        return []

    def _send_masks(self) -> None:
        for masks in self.scheduler.take_masks():
            self.executor.send_masks(masks)

    def _on_idle(self) -> None:
        if self._has_stepped and self._dp_sync:
            self.executor.send(Idle())
        self._has_stepped = False
        self.epochs.on_idle()

    # ---- the control channel ----

    def _send_transfers(self) -> None:
        if orders := self.scheduler.offload.take_orders():
            self.executor.send(TransferChunks(orders))

    def _handle_replies(self, timeout: float = 0.0) -> None:
        """Handles all replies; waits for the first one at most `timeout` seconds, for when nothing else is to be done."""
        for reply in self.executor.replies(timeout):
            self._handle_reply(reply)
        self._send_transfers()

    def _handle_reply(self, reply: Reply) -> None:
        match reply:
            case TransferDone():
                self.scheduler.on_transfer_done(reply)
            case TierStatus():
                self.scheduler.offload.update_status(reply)
            case MemoryReply():
                self.sleeper.on_reply(reply)
            case Prepared() | Unprepared() | Switched():
                self.epochs.on_reply(reply)
            case Balance(stage, now):
                self._balances[stage] = now
                self.scheduler.stats.eplb_balance = min(self._balances.values())  # of the worst stage
            case Rearranged():
                self._on_rearranged(reply)

    def _on_rearranged(self, done: Rearranged) -> None:
        stats = self.scheduler.stats
        stats.eplb_experts_moved_total += done.moved
        stats.eplb_seconds_total += done.seconds
        if done.complete:
            stats.eplb_rearrangements_total += 1
            stats.eplb_balance_before, stats.eplb_balance_after = done.before, done.after
        self.outbox.notify(done)


def _offload(config: EngineConfig, kv: KVManager) -> OffloadManager:
    worker = config.worker
    if worker.tiers is None:
        return OffloadManager()
    model = load_model_config(Path(worker.model_path))
    size = chunk_bytes(model, worker) * worker.layout.world_size
    return TieredOffload(kv, worker.tiers, host_slots(model, worker), size, config.scheduler.preempt)
