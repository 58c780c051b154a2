"""One worker in a thread of the engine core's process: for one rank. Kernels release the interpreter's lock while they run."""

import queue
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from starling_engine.config import WorkerConfig
from starling_engine.errors import RankLost
from starling_engine.ipc.child import import_for_good
from starling_engine.kv_offload.orders import Order, TierStatus, TransferDone
from starling_engine.sleep import MemoryOrderDone, ReleaseMemory, RestOrder, RestoreMemory
from starling_engine.step import StepPlan, StepResult
from starling_engine.topology.epoch import Balance, EpochAnswer, EpochOrder, Rearranged
from starling_engine.worker.report import Phase, WorkerReport

if TYPE_CHECKING:
    from starling_engine.kv_offload.transfers import TransferThreads
    from starling_engine.worker.worker import Worker

SHUTDOWN_SECONDS = 5.0


class ThreadExecutor:
    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._plans: queue.SimpleQueue[StepPlan | RestOrder | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[StepResult | MemoryOrderDone | TransferDone | TierStatus] = queue.SimpleQueue()
        self._results: deque[StepResult] = deque()
        self._moved: list[TransferDone] = []
        self._standing: TierStatus | None = None
        self._rested: MemoryOrderDone | None = None
        self._reports: queue.SimpleQueue[WorkerReport | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="worker-0", daemon=True)
        self._transfers: TransferThreads | None = None
        self._failure: BaseException | None = None
        """What ended the worker after it was ready."""
        self._phase = Phase("starting")
        self._progress = 0

    @property
    def progress(self) -> int:
        return self._progress

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def joining(self) -> str:
        return ""

    @property
    def store_port(self) -> int:
        return 0

    def start(self) -> None:
        self._thread.start()

    def ready(self, timeout: float) -> WorkerReport | None:
        try:
            report = self._reports.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(report, BaseException):
            raise report
        return report

    def submit(self, plan: StepPlan) -> None:
        self._plans.put(plan)

    def collect(self, timeout: float) -> StepResult | None:
        if not self._results:
            self._take(timeout)
        return self._results.popleft() if self._results else None

    def idle(self) -> None:
        """The worker waits for plans alone."""

    def order(self, order: EpochOrder) -> None:
        raise AssertionError(f"{type(order).__name__} is for cores that step with others")

    def answers(self) -> list[EpochAnswer]:
        return []

    def balances(self) -> list[Balance | Rearranged]:
        return []

    def rest(self, order: RestOrder) -> None:
        self._plans.put(order)

    def rested(self) -> MemoryOrderDone | None:
        self._take(0)
        rested, self._rested = self._rested, None
        return rested

    def move(self, orders: list[Order]) -> None:
        assert self._transfers is not None, "asked for where there are tiers"
        for order in orders:
            self._transfers.order(order)

    def moved(self, timeout: float) -> list[TransferDone]:
        if not self._moved:
            self._take(timeout)
        moved, self._moved = self._moved, []
        return moved

    def standing(self) -> TierStatus | None:
        self._take(0)
        standing, self._standing = self._standing, None
        return standing

    def _take(self, timeout: float) -> None:
        """Takes all that has been answered; waits for the first at most `timeout` seconds."""
        with suppress(queue.Empty):
            answer = self._answers.get(timeout=timeout) if timeout else self._answers.get_nowait()
            while True:
                if isinstance(answer, TransferDone):
                    self._moved.append(answer)
                elif isinstance(answer, TierStatus):
                    self._standing = answer
                elif isinstance(answer, MemoryOrderDone):
                    self._rested = answer
                else:
                    self._results.append(answer)
                answer = self._answers.get_nowait()

    def check(self) -> None:
        if self._failure is not None:
            raise RankLost(f"the worker ended: {self._failure}") from self._failure

    def shutdown(self) -> None:
        self._plans.put(None)
        self._thread.join(timeout=SHUTDOWN_SECONDS)

    def _tick(self) -> None:
        self._progress += 1

    def _report_phase(self, phase: Phase) -> None:
        self._phase = phase
        self._tick()

    def _run(self) -> None:
        # torch keeps thread counts and inference mode per thread, so all of it is imported and set where it runs.
        try:
            import_for_good("torch")
            from starling_engine.worker.worker import Worker

            worker = Worker(self._config, self._tick, self._report_phase, answer=self._answers.put)
            report = worker.prepare()
            self._transfers = worker.transfers
        except BaseException as error:  # noqa: BLE001 - whatever ended the loading is raised again in `ready`
            self._reports.put(error)
            return
        self._reports.put(report)
        try:
            self._serve(worker)
        except BaseException as error:  # noqa: BLE001 - raised again where the results are waited for
            self._fail(error)
        finally:
            if worker.transfers is not None:
                worker.transfers.close()

    def _serve(self, worker: "Worker") -> None:
        from starling_engine.worker.result_pump import ResultPump

        answering = ResultPump(self._answer, self._fail)
        while (plan := self._plans.get()) is not None:
            if isinstance(plan, ReleaseMemory | RestoreMemory):
                self._answers.put(worker.rest(plan))
            else:
                answering.add(worker.begin(plan))
            self._tick()
        answering.close(SHUTDOWN_SECONDS)

    def _answer(self, result: StepResult) -> None:
        self._answers.put(result)
        self._tick()

    def _fail(self, error: BaseException) -> None:
        self._failure = error
