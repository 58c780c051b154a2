"""Which platform serves a device, and what the CPU says of itself."""

import pytest
import torch
from starling_engine.errors import ConfigError
from starling_engine.platforms import cpu
from starling_engine.platforms.cgroup import Limits
from starling_engine.platforms.cpu import CpuPlatform
from starling_engine.platforms.select import select_platform

GIB = 1 << 30


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_the_cpu_is_chosen(device: str) -> None:
    platform = select_platform(device)
    assert platform.name == "cpu" and platform.device == torch.device("cpu")
    assert not platform.async_scheduling
    assert platform.default_threads() >= 1


@pytest.mark.parametrize(
    ("device", "present", "words"),
    [
        ("cuda", False, "torch finds no CUDA device here; possible: cpu"),
        ("cuda", True, "not supported in this release; possible: cpu"),
        ("tpu", False, "'tpu' is not known; possible: auto, cpu"),
    ],
)
def test_a_device_that_cannot_be_had_is_refused(device: str, present: bool, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: present)
    with pytest.raises(ConfigError, match=words) as caught:
        select_platform(device)
    assert caught.value.field == "device"


def test_memory_is_the_machines_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "read_limits", Limits)
    platform = CpuPlatform()
    assert GIB // 4 < platform.available_memory() <= platform.total_memory()


def test_memory_is_the_containers_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "read_limits", lambda: Limits(None, GIB // 8, GIB // 16))
    platform = CpuPlatform()
    assert platform.total_memory() == GIB // 8
    assert platform.available_memory() == GIB // 16
    monkeypatch.setattr(cpu, "read_limits", lambda: Limits(None, GIB // 8, GIB))
    assert platform.available_memory() == 0


def test_a_limit_beyond_the_machine_means_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "read_limits", lambda: Limits(None, 1 << 50, 0))
    assert CpuPlatform().total_memory() < 1 << 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_that_run(dtype: torch.dtype) -> None:
    CpuPlatform().check_dtype(dtype)


def test_a_dtype_that_does_not_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"float64 does not run on a CPU; possible: torch\.float32"):
        CpuPlatform().check_dtype(torch.float64)
