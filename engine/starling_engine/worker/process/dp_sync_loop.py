"""The loop of a worker that steps with ranks of other cores: its own core's plans when there are any, and serving in between."""

from collections import deque
from collections.abc import Callable

import zmq

from starling_engine.errors import RankLost
from starling_engine.expert_parallel.dp_sync import DpSync, SyncDecision
from starling_engine.expert_parallel.epoch import EpochPreparation, EpochPreparer
from starling_engine.step import StepPlan
from starling_engine.topology.epoch import Abandon, Commit, EpochPlan, Prepare, Prepared, Switched, Unprepared
from starling_engine.worker.commands import CommandHandler, Idle
from starling_engine.worker.counters import ProgressCounters
from starling_engine.worker.messages import Execute, Executed, FromWorker, PlanMessage, Stop
from starling_engine.worker.process.sockets import PlanSocket
from starling_engine.worker.worker import Worker

STAGE_POLL_MS = 1
"""Time that a rank of several stages waits for a plan before it serves without one: its next may depend on a stage behind it."""


class DpSyncLoop:
    """Receives plans and commands from `socket`; `send` sends to the executor. `counters` count progress as `rank`'s."""

    def __init__(
        self,
        worker: Worker,
        socket: PlanSocket,
        send: Callable[[FromWorker], None],
        counters: ProgressCounters,
        rank: int,
    ) -> None:
        self._worker = worker
        self._socket = socket
        self._send = send
        self._counters = counters
        self._rank = rank
        self._sync = DpSync()
        self._publisher = worker.expert_publisher()
        self._joiner = worker.epoch_joiner(self._publisher)
        self._rearrangement = worker.rearrangement()
        self._eplb = worker.eplb_manager(self._rearrangement, send)
        self._plans: deque[StepPlan] = deque()
        self._expects_plan = False
        """True until the core sends Idle: it will have more plans."""
        self._stopped = False
        self._commands = CommandHandler(worker, send)
        self._preparer = EpochPreparer(zmq.Context.instance(), self._joiner, self._load_progress)
        self._poller = zmq.Poller()
        self._poller.register(socket.socket, zmq.POLLIN)
        self._poller.register(self._preparer.socket, zmq.POLLIN)

    def run(self) -> None:
        """Runs until Stop."""
        while not self._stopped:
            self._wait()
            while not self._stopped and (message := self._socket.next()) is not None:
                self._handle(message)
            if (done := self._preparer.poll()) is not None:
                self._on_prepared(done)
            if not self._stopped and self._sync.needs_sync(has_plan=bool(self._plans)):
                self._step()

    def _step(self) -> None:
        epoch = self._sync.epoch
        assert epoch is not None, "without an epoch there is no sync"
        decision = self._sync.sync(has_plan=bool(self._plans), vote=self._eplb.vote())
        if decision is not SyncDecision.SWITCHED:
            self._eplb.act(self._sync.step, self._sync.votes)
        match decision:
            case SyncDecision.RUN:
                result = self._worker.attempt(self._plans.popleft())
                if result.error is not None and epoch.communicator.shard.count > 1:
                    raise RankLost(f"rank {self._rank} failed within a step that others share: {result.error}")
                if self._worker.samples or result.error is not None:
                    self._send(Executed(result))
                self._counters.finish_step(self._rank)
            case SyncDecision.SERVE:
                self._worker.serve()
            case SyncDecision.SWITCHED:
                self._on_switched()

    # ---- messages ----

    def _wait(self) -> None:
        """Waits until there is something to do."""
        if self._socket.has_message:
            return
        epoch = self._sync.epoch
        if epoch is None:
            self._poller.poll()
            return
        self._poller.register(epoch.wakeup.socket, zmq.POLLIN)
        self._poller.poll(self._poll_ms())
        self._poller.unregister(epoch.wakeup.socket)

    def _poll_ms(self) -> int | None:
        """Milliseconds to wait for a message; None: without a limit."""
        if self._plans:
            return 0
        if not self._sync.needs_sync(has_plan=False):
            return None
        if self._worker.num_stages > 1:
            return STAGE_POLL_MS
        return None if self._expects_plan else 0

    def _handle(self, message: PlanMessage) -> None:
        match message:
            case Execute(plan):
                self._plans.append(plan)
                self._expects_plan = True
            case Stop():
                self._stopped = True
            case Idle():
                self._expects_plan = False
            case Prepare(epoch_plan):
                self._prepare(epoch_plan)
            case Commit(number):
                self._commit(number)
            case Abandon():
                self._abandon()
            case command:
                self._commands.handle(command)

    # ---- epochs ----

    def _prepare(self, epoch_plan: EpochPlan) -> None:
        self._eplb.pause()
        if epoch_plan.dp is not None:
            rank, peers = self._joiner.rank_in(epoch_plan), self._publisher.find_peers(epoch_plan)
            self._rearrangement.start(epoch_plan.placement, rank, find_peers=peers)
        self._preparer.start(epoch_plan)

    def _commit(self, number: int) -> None:
        if self._sync.commit(number):
            self._on_switched()

    def _abandon(self) -> None:
        self._preparer.cancel()
        self._sync.abandon()
        if self._eplb.resume():
            self._rearrangement.cancel()

    def _load_progress(self) -> tuple[int, bool]:
        """Returns the experts that are loaded, and whether those are all.

        `wait_for_loads` calls this again and again. Each call counts as progress: this rank is not what is waited for.
        """
        self._counters.tick_beside_steps(self._rank)
        complete = self._rearrangement.loaded_layers == self._rearrangement.num_layers
        return self._rearrangement.progress[0], complete

    def _on_prepared(self, done: EpochPreparation) -> None:
        if done.error is not None:
            self._rearrangement.cancel()
            self._send(Unprepared(done.plan.number, done.error))
            return
        self._sync.prepare(done.plan, done.epoch)
        self._send(Prepared(done.plan.number, done.seconds, self._rearrangement.loaded if done.epoch is not None else {}))

    def _on_switched(self) -> None:
        epoch_plan = self._sync.prepared
        assert epoch_plan is not None
        if self._sync.epoch is not None:
            self._rearrangement.commit(self._sync.epoch.communicator)
            self._worker.epoch = epoch_plan.number
            self._eplb.begin_epoch(epoch_plan, self._sync.epoch.server_addresses)
        self._send(Switched(epoch_plan.number))
