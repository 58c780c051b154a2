"""What a rank does when it is told to sleep and to wake, on a device whose memory is not the host's."""

from typing import Any, cast

import pytest
import torch
from starling_engine.models.decoder import Decoder
from starling_engine.sleep import MemoryOrderDone, ReleaseMemory, RestoreMemory
from starling_engine.worker.sleep.memory import storages_of
from starling_engine.worker.sleep.sleeper import RankSleeper


class Weights:
    """Stands for a model: two matrices, one of them seen twice."""

    def __init__(self, device: torch.device, value: float) -> None:
        self.matrix = torch.full((64, 64), value, device=device)
        self.tied = self.matrix.T
        self.norm = torch.full((64,), value, device=device)

    @property
    def sizes(self) -> list[int]:
        return [tensor.untyped_storage().nbytes() for tensor in (self.matrix, self.tied, self.norm)]


Weights.__module__ = "starling_engine.models"


class Runner:
    def __init__(self) -> None:
        self.heard: list[object] = []

    def on_sleep(self) -> None:
        self.heard.append("sleep")

    def on_wake(self, model: object) -> None:
        self.heard.append(model)


class Bed:
    def __init__(self, device: torch.device) -> None:
        """Tensors are the host's where `device` stands in for one that is not there."""
        place = device if device.type == "cuda" else torch.device("cpu")
        self.weights, self.kv, self.runner = Weights(place, 1.0), torch.ones(1000, device=place), Runner()
        self.fresh = Weights(place, 2.0)
        self.fails = False
        self.rest = RankSleeper(cast(Decoder, self.weights), self._remake, cast(Any, self.runner), [self.kv, self.kv[:10]], device)

    def _remake(self) -> Decoder:
        if self.fails:
            raise OSError("the file is gone")
        return cast(Decoder, self.fresh)


@pytest.fixture(params=["stands in", "cuda"])
def bed(request: pytest.FixtureRequest) -> Bed:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")
    return Bed(torch.device("cuda" if request.param == "cuda" else "xpu"))


@pytest.mark.parametrize("tags", [["weights", "kv_cache"], ["kv_cache", "weights"]])
def test_weights_wait_in_host_memory(bed: Bed, tags: list[Any]) -> None:
    assert len(storages_of(bed.weights)) == 2
    assert bed.rest.carry_out(ReleaseMemory(1)) == MemoryOrderDone() == bed.rest.carry_out(ReleaseMemory(1))
    assert bed.weights.sizes == [0, 0, 0]
    for tag in tags:
        assert bed.weights not in bed.runner.heard, "not before all is there"
        assert bed.rest.carry_out(RestoreMemory([tag])) == MemoryOrderDone() == bed.rest.carry_out(RestoreMemory([tag]))
    assert bed.runner.heard == ["sleep", "sleep", bed.weights], "once"
    assert bool((bed.weights.tied == 1).all()) and bool((bed.weights.norm == 1).all()), "the same objects"
    assert not bed.kv.any()


def test_a_deeper_sleep_drops_them(bed: Bed) -> None:
    assert (
        bed.rest.carry_out(ReleaseMemory(1))
        == bed.rest.carry_out(ReleaseMemory(2))
        == bed.rest.carry_out(ReleaseMemory(1))
        == MemoryOrderDone()
    )
    assert bed.weights.sizes == [0, 0, 0]
    bed.fails = True
    assert bed.rest.carry_out(RestoreMemory(["weights", "kv_cache"])) == MemoryOrderDone("OSError: the file is gone")
    assert bed.runner.heard[-1] == "sleep"
    bed.fails = False
    assert bed.rest.carry_out(RestoreMemory(["weights", "kv_cache"])) == MemoryOrderDone()
    assert bed.runner.heard[-1] is bed.fresh
    assert bed.rest.carry_out(ReleaseMemory(2)) == MemoryOrderDone() and bed.fresh.sizes == [0, 0, 0]


def test_where_host_memory_does_not_suffice_nothing_has_changed(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> torch.Tensor:
        raise MemoryError("out of host memory")

    monkeypatch.setattr("starling_engine.worker.sleep.memory.anonymous", full)
    assert bed.rest.carry_out(ReleaseMemory(1)) == MemoryOrderDone("MemoryError: out of host memory")
    assert all(bed.weights.sizes) and bool(bed.kv.all()) and not bed.runner.heard
    assert bed.rest.carry_out(RestoreMemory(["weights", "kv_cache"])) == MemoryOrderDone() and not bed.runner.heard
