"""The platform of each device, and the limits that the CPU reports."""

import subprocess
import sys

import pytest
import torch
from starling_engine.errors import ConfigError
from starling_engine.platforms import cpu
from starling_engine.platforms.cgroup import Limits
from starling_engine.platforms.cpu import CpuPlatform
from starling_engine.platforms.cuda import CudaPlatform
from starling_engine.platforms.select import select_platform

GIB = 1 << 30


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_the_cpu_is_chosen(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    platform = select_platform(device)
    assert platform.name == "cpu" and platform.device == torch.device("cpu")
    assert not platform.async_scheduling


@pytest.mark.parametrize(
    ("device", "present", "words"),
    [
        ("cuda", False, "torch finds no CUDA device here; possible: cpu"),
        ("interpreter", False, "only in its interpreter .TRITON_INTERPRET=1., for tests"),
        ("tpu", False, "'tpu' is not known; possible: auto, cpu, cuda, interpreter"),
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
    with pytest.raises(ConfigError, match=r"float64 is not supported on a CPU; supported: torch\.float32"):
        CpuPlatform().check_dtype(torch.float64)


@pytest.mark.parametrize(("capability", "serves"), [((7, 5), False), ((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_a_gpu_that_cannot_convert_fp8_caches_none(
    capability: tuple[int, int], serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = object.__new__(CudaPlatform)
    platform.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla")
    for dtype in (torch.float16, torch.int8, torch.uint8):
        platform.check_kv_dtype(dtype)
    if serves:
        platform.check_kv_dtype(torch.float8_e4m3fn)
        return
    words = rf"8\.9 or more, and Tesla has {capability[0]}\.{capability[1]}; possible: auto, int8, int4"
    with pytest.raises(ConfigError, match=words) as caught:
        platform.check_kv_dtype(torch.float8_e4m3fn)
    assert caught.value.field == "kv_cache_dtype"


FAULTS = """
import resource, torch
from starling_engine.platforms.cpu import CpuPlatform

def faults(kept):
    if kept:
        CpuPlatform().keep_freed_memory()
    before = 0
    for attempt in range(12):
        if attempt == 8:  # where among others' the blocks lie is chance; until they fit, there may be some more
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [torch.ones(1 << size) for size in (18, 20, 22, 23, 24)]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults(False), faults(True))
"""


def test_what_a_step_frees_is_there_for_the_next_one() -> None:
    """Counted in page faults of a process of its own, for the setting is the process's."""
    output = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True).stdout
    before, kept = map(int, output.split())
    assert before > 1000, "the C library gives memory back, or this shows nothing"
    assert kept < before / 20
