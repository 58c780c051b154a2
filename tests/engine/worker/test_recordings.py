"""Recorded steps hold when they are replayed as calls on tensors, with all else poisoned, as a GPU replays a graph."""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from starling_engine.ipc.collection import no_collection
from starling_engine.params import SamplingParams
from starling_engine.platforms import interpreted
from starling_engine.platforms.device_queue import Replay
from starling_engine.platforms.interpreted import InlineQueue
from starling_engine.platforms.triton_support import INTERPRETED
from starling_engine.request import EngineRequest
from starling_engine.worker.device import graphs
from starling_engine.worker.device.device_runner import DeviceRunner

from tests.engine.checkpoints import VARIANTS, make_reference
from tests.engine.cores import core_for, run
from tests.engine.tape_queue import TapeQueue

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, and recordings are graphs")

STEPS = 4

X, OUT = torch.ones(3), torch.zeros(3)


class Host:
    """A step that adds what the host says."""

    def __init__(self) -> None:
        self.added, self.kept = 1.0, torch.zeros(3)

    def add(self) -> None:
        OUT.copy_(X + self.added)

    def keep(self) -> None:
        self.kept = X + 1
        OUT.copy_(self.kept)


def captured(queue: InlineQueue, work: Callable[[], object]) -> Replay:
    with no_collection():
        return queue.capture(lambda: (work(), None)[1])


def test_a_value_of_the_host_is_the_one_of_the_recording() -> None:
    found = []
    for queue in (TapeQueue(), InlineQueue()):
        host = Host()
        replay = captured(queue, host.add)
        for X[:], host.added in ((2.0, 1.0), (5.0, 10.0)):
            replay()
            found.append(OUT.tolist())
    assert found == [[3.0] * 3, [6.0] * 3, [3.0] * 3, [15.0] * 3], "tensors change, and the host's own value does not"


def test_nothing_happens_while_it_is_recorded_and_nothing_it_has_made_is_left() -> None:
    host = Host()
    OUT.fill_(7)
    X.fill_(1)
    replay = captured(TapeQueue(), host.keep)
    assert OUT.tolist() == [7.0] * 3
    replay()
    assert OUT.tolist() == [2.0] * 3 and host.kept.isnan().all()


@pytest.mark.parametrize(
    "wait",
    [
        lambda: X.sum().item(),
        lambda: X.tolist(),
        lambda: X.numpy(),
        lambda: X.data_ptr(),
        lambda: X.cpu(),
        lambda: X.nonzero(),
        lambda: X[X > 0],
        lambda: bool(X[0] > 0),
        lambda: torch.tensor(3.0),
    ],
    ids=["item", "tolist", "numpy", "address", "cpu", "nonzero", "mask", "bool", "new tensor"],
)
def test_a_recording_waits_for_nothing(wait: Callable[[], object]) -> None:
    with pytest.raises(AssertionError, match="in a recording"):
        captured(TapeQueue(), wait)


@pytest.mark.parametrize("in_a_circle", [False, True])
def test_a_recording_holds_no_memory_that_it_has_not_made(in_a_circle: bool) -> None:
    """What it reads and writes has to be held by somebody else, also where garbage is collected late."""
    read: list[object] = [torch.ones(3)]
    replay = captured(TapeQueue(), lambda: OUT.copy_(read[0] + 1))
    replay()
    assert OUT.tolist() == [2.0] * 3
    if in_a_circle:
        circle = [read.pop()]
        circle.append(circle)
        del circle
        replay()
        gc.collect()
    read.clear()
    with pytest.raises(AssertionError, match="nobody holds"):
        replay()


def test_nothing_is_recorded_where_garbage_may_be_collected() -> None:
    with pytest.raises(AssertionError, match="a collection"):
        TapeQueue().capture(Host().add)


@pytest.mark.parametrize("name", ["qwen3-mixed", pytest.param("deepseek-v3", marks=pytest.mark.whole)])
def test_an_engine_that_replays_tapes_answers_as_the_host(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, then decodes, in recordings with room for more. After each, all that it has made is poison.

    Garbage is collected meanwhile, at random calls.
    """
    reference = make_reference(tmp_path, VARIANTS[name])
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    prompts = {"a": reference.prompt[:10], "b": reference.prompt[20:23]}
    requests = [EngineRequest(id=name, prompt_ids=prompt, params=params) for name, prompt in prompts.items()]
    with core_for(tmp_path, budget=16) as core:
        expected = run(core, requests)
    monkeypatch.setenv(INTERPRETED, "1")
    queues: list[TapeQueue] = []

    class Kept(TapeQueue):
        def __init__(self) -> None:
            super().__init__()
            queues.append(self)

    monkeypatch.setattr(interpreted, "InlineQueue", Kept)
    monkeypatch.setattr(graphs, "decode_sizes", lambda _: [3])
    monkeypatch.setattr(graphs, "draft_sizes", lambda _: [])
    monkeypatch.setattr(graphs, "mixed_sizes", lambda _: [16])
    monkeypatch.setattr(DeviceRunner, "warm", lambda _: None)
    with core_for(tmp_path, device="interpreter", budget=16) as core:
        assert run(core, requests) == expected
        assert core.scheduler.stats.steps_not_recorded == 0
        assert queues[0].replays >= core.scheduler.stats.steps_total >= STEPS and queues[0].collections > 1
