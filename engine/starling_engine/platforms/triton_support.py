"""Says on which devices Triton's kernels run. Imports neither torch nor triton."""

import functools
import importlib.util
import os
import shutil
from dataclasses import dataclass
from typing import Protocol

INTERPRETED = "TRITON_INTERPRET"
"""Triton's own environment variable. With 1, set before a kernel is imported, kernels run as numpy on CPU tensors, for tests."""


@dataclass(frozen=True, slots=True)
class GpuKind:
    """A GPU to compile for: compute capability, 90 for 9.0, and number of streaming multiprocessors."""

    capability: int
    processors: int


H200 = GpuKind(90, 132)

stand_in: GpuKind | None = None
"""Set in processes that only compile kernels (`kernels.ahead`): they are launched on the meta device, as if it were this GPU."""


class Device(Protocol):
    """A torch.device, of which only the type matters."""

    @property
    def type(self) -> str: ...


@functools.cache
def sms(device: Device) -> int:
    """Returns the number of streaming multiprocessors of the device; an H200's where it is no GPU and stands in for none."""
    if device.type == "cuda":
        import torch  # which a process with a GPU has

        return int(torch.cuda.get_device_properties(str(device)).multi_processor_count)
    return (stand_in or H200).processors


@functools.cache
def capability(device: Device) -> int:
    """Returns the compute capability of the device, 90 for 9.0; an H200's where it is no GPU and stands in for none."""
    if device.type == "cuda":
        import torch

        major, minor = torch.cuda.get_device_capability(str(device))
        return 10 * major + minor
    return (stand_in or H200).capability


def triton_runs(device: Device) -> bool:
    """Returns whether Triton's kernels take tensors of `device`: on CUDA, and on a CPU in the interpreter."""
    return why_not_triton(device) is None


def why_not_triton(device: Device) -> str | None:
    """Returns why they do not; None where they do."""
    if device.type == "meta" and stand_in is not None:
        return None
    if not is_installed():
        return "triton is not installed"
    if device.type == "cuda" and not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler (gcc or clang) on the PATH, or named by CC"
    if device.type == "cuda" or (device.type == "cpu" and os.environ.get(INTERPRETED) == "1"):
        return None
    return f"Triton's kernels run on a {device.type} only in its interpreter ({INTERPRETED}=1), for tests"


@functools.cache
def is_installed() -> bool:
    """Looks for the package once: layers ask one by one, and each look goes through the folders of sys.path."""
    return importlib.util.find_spec("triton") is not None
