"""No garbage is collected while a step is recorded, a recording is tried twice, and what cannot be recorded is counted."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from starling_engine.ipc.collection import collect_everything, freeze_heap, no_collection
from starling_engine.kernels.ahead import LateKernels
from starling_engine.platforms.device_queue import Replay
from starling_engine.platforms.interpreted import InlineQueue
from starling_engine.worker.device.graphs import Graphs

from tests.engine.checkpoints import VARIANTS, make_reference
from tests.engine.cores import core_for, greedy, run
from tests.engine.late_device import use_late_device


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
