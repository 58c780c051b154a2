"""A rank sleeps and wakes, on a device whose memory is not the host's."""

from typing import Any, cast

import pytest
import torch
from starling_engine.models.decoder import Decoder
from starling_engine.sleep import MemoryReply, ReleaseMemory, RestoreMemory
from starling_engine.worker.sleep.memory import storages_of
from starling_engine.worker.sleep.sleeper import RankSleeper


class Weights:
    """Stands in for a model: a matrix, a view of it, and a vector."""

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
        self.calls: list[object] = []

    def on_sleep(self) -> None:
        self.calls.append("sleep")

    def on_wake(self, model: object) -> None:
        self.calls.append(model)


class Rank:
    def __init__(self, device: torch.device) -> None:
        """Tensors are on the host if the machine has no `device`."""
        at = device if device.type == "cuda" else torch.device("cpu")
        self.weights, self.kv, self.runner = Weights(at, 1.0), torch.ones(1000, device=at), Runner()
        self.fresh = Weights(at, 2.0)
        self.fails = False
        self.sleeper = RankSleeper(
            cast(Decoder, self.weights), self._remake, cast(Any, self.runner), [self.kv, self.kv[:10]], device
        )

    def _remake(self) -> Decoder:
        if self.fails:
            raise OSError("the file is gone")
        return cast(Decoder, self.fresh)


@pytest.fixture(params=["stands in", "cuda"])
def rank(request: pytest.FixtureRequest) -> Rank:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")
    return Rank(torch.device("cuda" if request.param == "cuda" else "xpu"))


@pytest.mark.parametrize("tags", [["weights", "kv_cache"], ["kv_cache", "weights"]])
def test_weights_wait_in_host_memory(rank: Rank, tags: list[Any]) -> None:
    assert len(storages_of(rank.weights)) == 2
    assert rank.sleeper.carry_out(ReleaseMemory(1)) == MemoryReply() == rank.sleeper.carry_out(ReleaseMemory(1))
    assert rank.weights.sizes == [0, 0, 0]
    for tag in tags:
        assert rank.weights not in rank.runner.calls, "not before all is restored"
        assert rank.sleeper.carry_out(RestoreMemory([tag])) == MemoryReply() == rank.sleeper.carry_out(RestoreMemory([tag]))
    assert rank.runner.calls == ["sleep", "sleep", rank.weights], "once"
    assert bool((rank.weights.tied == 1).all()) and bool((rank.weights.norm == 1).all()), "the same objects"
    assert not rank.kv.any()


def test_a_deeper_sleep_drops_the_weights(rank: Rank) -> None:
    assert (
        rank.sleeper.carry_out(ReleaseMemory(1))
        == rank.sleeper.carry_out(ReleaseMemory(2))
        == rank.sleeper.carry_out(ReleaseMemory(1))
        == MemoryReply()
    )
    assert rank.weights.sizes == [0, 0, 0]
    rank.fails = True
    assert rank.sleeper.carry_out(RestoreMemory(["weights", "kv_cache"])) == MemoryReply("OSError: the file is gone")
    assert rank.runner.calls[-1] == "sleep"
    rank.fails = False
    assert rank.sleeper.carry_out(RestoreMemory(["weights", "kv_cache"])) == MemoryReply()
    assert rank.runner.calls[-1] is rank.fresh
    assert rank.sleeper.carry_out(ReleaseMemory(2)) == MemoryReply() and rank.fresh.sizes == [0, 0, 0]


def test_without_enough_host_memory_nothing_changes(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> torch.Tensor:
        raise MemoryError("out of host memory")

    monkeypatch.setattr("starling_engine.worker.sleep.memory.anonymous", full)
    assert rank.sleeper.carry_out(ReleaseMemory(1)) == MemoryReply("MemoryError: out of host memory")
    assert all(rank.weights.sizes) and bool(rank.kv.all()) and not rank.runner.calls
    assert rank.sleeper.carry_out(RestoreMemory(["weights", "kv_cache"])) == MemoryReply() and not rank.runner.calls
