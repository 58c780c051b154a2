"""One worker in a thread of the engine core's process: for one rank. Kernels release the interpreter's lock while they run."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from starling_engine.config import WorkerConfig
from starling_engine.errors import RankLost
from starling_engine.ipc.child import import_for_good
from starling_engine.kv_offload.orders import TransferChunks, TransferOrder
from starling_engine.step import StepMasks, StepPlan, StepResult
from starling_engine.worker.commands import Command, CommandHandler, Reply
from starling_engine.worker.messages import Phase, WorkerReport

if TYPE_CHECKING:
    from starling_engine.worker.masks import MaskQueue
    from starling_engine.worker.result_pump import ResultPump
    from starling_engine.worker.worker import Worker

SHUTDOWN_SECONDS = 5.0


class ThreadExecutor:
    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._input: queue.SimpleQueue[StepPlan | Command | None] = queue.SimpleQueue()
        self._output: queue.SimpleQueue[StepResult | Reply] = queue.SimpleQueue()
        self._results: deque[StepResult] = deque()
        self._replies: list[Reply] = []
        self._reports: queue.SimpleQueue[WorkerReport | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="worker-0", daemon=True)
        self._transfer: Callable[[Sequence[TransferOrder]], None] | None = None
        self._masks: MaskQueue | None = None
        self._failure: BaseException | None = None
        """The error that ended the worker after it was ready."""
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
        self._input.put(plan)

    def send_masks(self, masks: StepMasks) -> None:
        assert self._masks is not None, "the worker has to be ready"
        self._masks.put(masks)

    def collect(self, timeout: float) -> StepResult | None:
        if not self._results:
            self._receive(timeout)
        return self._results.popleft() if self._results else None

    def send(self, command: Command) -> None:
        if isinstance(command, TransferChunks):  # beside the steps
            assert self._transfer is not None, "the worker has to be ready"
            self._transfer(command.orders)
        else:
            self._input.put(command)

    def replies(self, timeout: float = 0.0) -> list[Reply]:
        self._receive(0.0 if self._replies else timeout)
        replies, self._replies = self._replies, []
        return replies

    def check(self) -> None:
        if self._failure is not None:
            raise RankLost(f"the worker ended: {self._failure}") from self._failure

    def shutdown(self) -> None:
        self._input.put(None)
        self._thread.join(timeout=SHUTDOWN_SECONDS)

    def _receive(self, timeout: float) -> None:
        """Receives all output that is there; waits for the first at most `timeout` seconds."""
        with suppress(queue.Empty):
            output = self._output.get(timeout=timeout) if timeout else self._output.get_nowait()
            while True:
                if isinstance(output, StepResult):
                    self._results.append(output)
                else:
                    self._replies.append(output)
                output = self._output.get_nowait()

    def _tick(self) -> None:
        self._progress += 1

    def _report_phase(self, phase: Phase) -> None:
        self._phase = phase
        self._tick()

    def _run(self) -> None:
        # torch keeps thread counts and inference mode per thread, so all of it is imported and set where it runs.
        try:
            import_for_good("torch")
            from starling_engine.worker.masks import MaskQueue
            from starling_engine.worker.result_pump import ResultPump
            from starling_engine.worker.worker import Worker

            self._masks = MaskQueue()
            worker = Worker(self._config, self._tick, self._report_phase, reply=self._output.put, masks=self._masks)
            report = worker.prepare()
            pump = ResultPump(self._put_result, self._fail)
            commands = CommandHandler(worker, self._output.put, pump.settle)
            self._transfer = worker.transfer
        except BaseException as error:  # noqa: BLE001 - whatever ended the loading is raised again in `ready`
            self._reports.put(error)
            return
        self._reports.put(report)
        try:
            self._serve(worker, pump, commands)
        except BaseException as error:  # noqa: BLE001 - raised again where the results are waited for
            self._fail(error)
        finally:
            worker.close()

    def _serve(self, worker: "Worker", pump: "ResultPump", commands: CommandHandler) -> None:
        while (item := self._input.get()) is not None:
            if isinstance(item, StepPlan):
                pump.add(worker.begin(item))
            else:
                commands.handle(item)
            self._tick()
        pump.close(SHUTDOWN_SECONDS)

    def _put_result(self, result: StepResult) -> None:
        self._output.put(result)
        self._tick()

    def _fail(self, error: BaseException) -> None:
        self._failure = error
