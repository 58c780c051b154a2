"""No garbage is collected while a step is recorded, a recording is tried twice, and what cannot be recorded is counted."""

import gc
import io
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from starling_engine.config import EngineConfig, SchedulerConfig
from starling_engine.core import process
from starling_engine.core.launcher import CoreStart
from starling_engine.ipc.collection import collect_everything, freeze_heap, no_collection
from starling_engine.kernels.ahead import LateKernels
from starling_engine.platforms.device_queue import Replay
from starling_engine.platforms.interpreted import InlineQueue
from starling_engine.worker.device.graphs import Graphs
from starling_engine.worker.messages import FromWorker, Start, ToWorker
from starling_engine.worker.process import worker_process
from starling_engine.worker.process.worker_process import WorkerProcess

from tests.engine.checkpoints import VARIANTS, make_reference
from tests.engine.cores import core_for, greedy, run
from tests.engine.held_executor import StuckExecutor
from tests.engine.late_device import use_late_device
from tests.engine.workers import plain_worker


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Leaves the heap frozen, as it was: each collection of later tests would else look through all that pytest holds."""
    yield
    assert gc.isenabled() and gc.get_freeze_count() > 0


class Recorder(InlineQueue):
    """Refuses the first `failures` recordings; notes whether garbage might have been collected in each."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.collecting: list[bool] = []

    def capture(self, work: Callable[[], None]) -> Replay:
        self.collecting.append(gc.isenabled())
        if len(self.collecting) <= self.failures:
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().capture(work)


def graphs(queue: Recorder) -> Graphs:
    return Graphs(queue, 4, 32, 4, 0)


@pytest.mark.parametrize("failures", [0, 1])
def test_nothing_is_collected_in_a_recording_and_a_failed_one_is_tried_again(failures: int) -> None:
    queue = Recorder(failures)
    recorded, ran = graphs(queue), []
    shape = recorded.shapes[0]
    for _ in range(3):
        recorded.run(shape, lambda: ran.append(gc.isenabled()))
    assert queue.collecting == [False] * (1 + failures)
    assert recorded.not_recorded == 0 and len(ran) == 3


def test_a_size_that_cannot_be_recorded_is_counted_and_launched_kernel_by_kernel() -> None:
    queue = Recorder(failures=9)
    recorded, ran = graphs(queue), []
    for _ in range(3):
        recorded.run(recorded.shapes[0], lambda: ran.append(1))
    assert recorded.not_recorded == 1 and len(queue.collecting) == 2 and len(ran) == 3
    recorded.forget()
    assert recorded.not_recorded == 0, "after a sleep it is tried anew"


def test_the_engine_tells_of_sizes_not_recorded_and_kernels_met_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = make_reference(tmp_path, VARIANTS["llama3.1"])
    use_late_device(monkeypatch.setattr, recorded=True)

    def refuse(_queue: InlineQueue, _work: Callable[[], None]) -> Replay:
        raise RuntimeError("no room")

    monkeypatch.setattr(InlineQueue, "capture", refuse)
    monkeypatch.setattr(LateKernels, "take", lambda _: 1)
    with core_for(tmp_path, budget=24) as core:
        run(core, [greedy("1", reference.prompt)])
        stats = core.scheduler.stats
        assert stats.steps_not_recorded > 3 and stats.kernels_compiled_total == stats.steps_total


def test_collection_goes_on_after_a_recording_that_fails() -> None:
    with pytest.raises(ValueError, match="x"), no_collection():
        raise ValueError("x")
    assert gc.isenabled()
    with no_collection(), no_collection():
        pass
    assert gc.isenabled()


class Cycle:
    def __init__(self, dropped: list[int]) -> None:
        self.itself, self.dropped = self, dropped

    def __del__(self) -> None:
        self.dropped.append(1)


def test_what_is_dropped_when_the_heap_is_frozen_is_collected_for_a_sleep() -> None:
    dropped: list[int] = []
    held = Cycle(dropped)
    freeze_heap()
    assert gc.get_freeze_count() > 0
    del held
    gc.collect()
    assert not dropped, "a collection looks at nothing that is frozen"
    collect_everything()
    assert dropped and gc.get_freeze_count() > 0


class HeapFrozen(BaseException):
    """Ends a process that has come so."""


class StepTaken(BaseException):
    """Ends a core that serves before its heap is frozen."""


def freeze() -> None:
    raise HeapFrozen


class ServingExecutor(StuckExecutor):
    def check(self) -> None:
        raise StepTaken


def test_a_core_freezes_its_heap_before_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = SchedulerConfig(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64)
    config = EngineConfig(scheduler=scheduler, worker=plain_worker(), block_size=16, progress_timeout=20.0)
    start = msgspec.json.encode(CoreStart(f"ipc://{tmp_path}/core", None, config, logging.INFO))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(start + b"\n")))
    monkeypatch.setattr(sys, "argv", ["core"])
    monkeypatch.setattr(process, "live_with_parent", lambda *_: None)
    monkeypatch.setattr(process, "make_executor", lambda *_: ServingExecutor())
    monkeypatch.setattr(process, "freeze_heap", freeze)
    with pytest.raises(HeapFrozen):
        process.main()


class UnconnectedWorker(WorkerProcess):
    """Gets ready without an executor; `sent` has the names of its messages."""

    def __init__(self, folder: Path) -> None:
        self._rank, self._host, self._address, self._counters = 0, "", "", None
        self._socket: Any = None
        self._config = plain_worker(counters=str(folder / "counters"))
        self.sent: list[str] = []

    def _send(self, message: FromWorker) -> None:
        self.sent.append(type(message).__name__)

    def _receive(self) -> ToWorker:
        return Start(self._config)

    def _make_loop(self, *_: object, **__: object) -> Any:
        return SimpleNamespace(run=lambda: None)


def test_a_worker_freezes_its_heap_before_it_says_that_it_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = SimpleNamespace(ledger=None, seconds=[{}], async_scheduling=True, step_target_ms=0, makes_drafts=False)
    worker = SimpleNamespace(prepare=lambda: report, close=lambda: None)
    for name, stand_in in (("serve_store", SimpleNamespace(port=1)), ("PlanSocket", None), ("Worker", worker)):
        monkeypatch.setattr(worker_process, name, lambda *_, of=stand_in: of)
    unconnected = UnconnectedWorker(tmp_path)
    monkeypatch.setattr(worker_process, "freeze_heap", lambda: unconnected.sent.append("frozen"))
    unconnected.run()
    assert unconnected.sent == ["Joined", "frozen", "WorkerReady"]
