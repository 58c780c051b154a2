"""One worker in a thread of the engine core's process: for one rank. Kernels release the interpreter's lock while they run."""

import queue
import threading

from starling_engine.child import import_for_good
from starling_engine.config import WorkerConfig
from starling_engine.epoch import Balance, EpochAnswer, EpochOrder, Rearranged
from starling_engine.step import StepPlan, StepResult
from starling_engine.worker.report import Phase, WorkerReport


class ThreadExecutor:
    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
        self._reports: queue.SimpleQueue[WorkerReport | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="worker-0", daemon=True)
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
        try:
            return self._results.get(timeout=timeout)
        except queue.Empty:
            return None

    def idle(self) -> None:
        """The worker waits for plans alone."""

    def order(self, order: EpochOrder) -> None:
        raise AssertionError(f"{type(order).__name__} is for cores that step with others")

    def answers(self) -> list[EpochAnswer]:
        return []

    def balances(self) -> list[Balance | Rearranged]:
        return []

    def check(self) -> None:
        """The worker is a thread: it lives as long as whoever asks."""

    def shutdown(self) -> None:
        self._plans.put(None)
        self._thread.join(timeout=5)

    def _tick(self) -> None:
        self._progress += 1

    def _report_phase(self, phase: Phase) -> None:
        self._phase = phase
        self._tick()

    def _run(self) -> None:
        # torch keeps thread counts and inference mode per thread, so all of it is imported and set where it runs.
        import_for_good("torch")
        from starling_engine.worker.worker import Worker

        try:
            worker = Worker(self._config, self._tick, self._report_phase)
            report = worker.prepare()
        except BaseException as error:  # noqa: BLE001 - whatever ended the loading is raised again in `ready`
            self._reports.put(error)
            return
        self._reports.put(report)
        while (plan := self._plans.get()) is not None:
            self._results.put(worker.attempt(plan))
            self._tick()
