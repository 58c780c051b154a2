"""The loop of a worker that steps with ranks of other cores: its own core's plans when there are any, and serving in between."""

from collections import deque
from collections.abc import Callable
from contextlib import suppress

import zmq

from starling_engine.errors import RankLost
from starling_engine.expert_parallel.dp_sync import DpSync, Epoch, SyncDecision
from starling_engine.expert_parallel.preparing import EpochPreparation, EpochPreparer
from starling_engine.step import StepPlan
from starling_engine.topology.epoch import Abandon, Commit, EpochPlan, Prepare, Prepared, Switched, Unprepared
from starling_engine.worker.counters import ProgressCounters
from starling_engine.worker.messages import Execute, Executed, FromWorker, Idle, Stop, ToWorker
from starling_engine.worker.worker import Worker

STAGE_POLL_MS = 1
"""How long a rank of several stages waits for a plan before it serves without one: its next may hang on a stage behind it."""


class DpSyncLoop:
    """`socket` is the executor's; `decode` and `send` are of its messages. `counters` hear of progress as `rank`'s."""

    def __init__(
        self,
        worker: Worker,
        socket: zmq.Socket[bytes],
        decode: Callable[[bytes], ToWorker],
        send: Callable[[FromWorker], None],
        counters: ProgressCounters,
        rank: int,
    ) -> None:
        self._worker = worker
        self._socket = socket
        self._decode = decode
        self._send = send
        self._counters = counters
        self._rank = rank
        self._steps = DpSync()
        self._holders = worker.holders()
        self._moves = worker.rearrangement()
        self._balancing = worker.balancing(self._moves, send)
        self._plans: deque[StepPlan] = deque()
        self._expects = False
        """The core has said that it will have more."""
        self._stopped = False
        self._preparer = EpochPreparer(zmq.Context.instance(), self._prepare)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._preparer.socket, zmq.POLLIN)

    def run(self) -> None:
        """Until Stop."""
        while not self._stopped:
            self._wait()
            while not self._stopped and self._socket.poll(0):
                self._handle(self._decode(self._socket.recv()))
            if (made := self._preparer.take()) is not None:
                self._take_prepared(made)
            if not self._stopped and self._steps.wants_turn(has_plan=bool(self._plans)):
                self._turn()

    def _turn(self) -> None:
        epoch = self._steps.epoch
        assert epoch is not None, "in no epoch there is no turn"
        turn = self._steps.turn(has_plan=bool(self._plans), says=self._balancing.says())
        if turn is not SyncDecision.SWITCHED:
            self._balancing.hear(self._steps.step, self._steps.said)
        match turn:
            case SyncDecision.RUN:
                result = self._worker.attempt(self._plans.popleft())
                if result.error is not None and epoch.ranks.shard.count > 1:
                    raise RankLost(f"rank {self._rank} failed within a step that others share: {result.error}")
                if self._worker.samples or result.error is not None:
                    self._send(Executed(result))
                self._counters.finish_step(self._rank)
            case SyncDecision.SERVE:
                self._worker.serve()
            case SyncDecision.SWITCHED:
                self._switched()

    # ---- messages ----

    def _wait(self) -> None:
        """Until there is something to do."""
        epoch = self._steps.epoch
        if epoch is None:
            self._poller.poll()
            return
        self._poller.register(epoch.bells.socket, zmq.POLLIN)
        self._poller.poll(self._patience())
        self._poller.unregister(epoch.bells.socket)

    def _patience(self) -> int | None:
        """Milliseconds to wait for a message; None: as long as it takes."""
        if self._plans:
            return 0
        if not self._steps.wants_turn(has_plan=False):
            return None
        if self._worker.num_stages > 1:
            return STAGE_POLL_MS
        return None if self._expects else 0

    def _handle(self, message: ToWorker) -> None:
        match message:
            case Execute(plan):
                self._plans.append(plan)
                self._expects = True
            case Idle():
                self._expects = False
            case Prepare(epoch):
                self._begin(epoch)
            case Commit(number):
                if self._steps.commit(number):
                    self._switched()
            case Abandon():
                self._preparer.cancel()
                self._steps.withdraw()
                if self._balancing.resume():
                    self._moves.cancel()
            case Stop():
                self._stopped = True
            case _:
                raise AssertionError(f"{type(message).__name__} is no message to a worker that is ready")

    # ---- epochs ----

    def _begin(self, plan: EpochPlan) -> None:
        self._balancing.pause()
        if plan.dp is not None:
            self._moves.start(plan.placement, self._worker.rank_among(plan.dp), find_peers=self._holders.before(plan))
        self._preparer.start(plan)

    def _prepare(self, plan: EpochPlan, cancelled: Callable[[], bool]) -> Epoch | None:
        """In a thread of the preparer's."""
        if plan.dp is None:
            with suppress(RankLost):  # whoever needs what is here misses the rendezvous too, and knows for whom it waits
                self._holders.tell(plan)
            return None
        self._holders.tell(plan)
        return self._worker.join_epoch(plan, self._loaded, cancelled, self._holders.address)

    def _loaded(self) -> tuple[int, bool]:
        """As `meet` asks again and again; its executor sees that this rank is not what is waited for."""
        self._counters.stir(self._rank)
        complete = self._moves.ready == self._moves.num_layers
        return self._moves.progress[0], complete

    def _take_prepared(self, made: EpochPreparation) -> None:
        if made.error is not None:
            self._moves.cancel()
            self._send(Unprepared(made.plan.number, made.error))
            return
        self._steps.offer(made.plan, made.epoch)
        self._send(Prepared(made.plan.number, made.seconds, self._moves.loaded if made.epoch is not None else {}))

    def _switched(self) -> None:
        plan = self._steps.prepared
        assert plan is not None
        if self._steps.epoch is not None:
            self._moves.commit(self._steps.epoch.ranks)
            self._worker.epoch = plan.number
            self._balancing.begin(plan, self._steps.epoch.addresses)
        self._send(Switched(plan.number))
