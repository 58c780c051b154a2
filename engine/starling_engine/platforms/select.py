"""Chooses the platform that the argument `device` names."""

import torch

from starling_engine.errors import ConfigError
from starling_engine.platforms.base import Platform
from starling_engine.platforms.cpu import CpuPlatform
from starling_engine.platforms.cuda import CudaPlatform
from starling_engine.platforms.interpreted import InterpretedPlatform


def select_platform(device: str, index: int = 0) -> Platform:
    """Returns the platform of this process; "auto" takes a GPU where torch finds one. `index` is the rank's number on its node.

    Raises ConfigError for a device that this machine does not have.
    """
    match device:
        case "auto":
            return CudaPlatform(index) if torch.cuda.is_available() else CpuPlatform()
        case "cpu":
            return CpuPlatform()
        case "cuda" if torch.cuda.is_available():
            return CudaPlatform(index)
        case "cuda":
            raise ConfigError("cuda was asked for, but torch finds no CUDA device here; possible: cpu", "device")
        case "interpreter":
            return InterpretedPlatform()
    raise ConfigError(f"{device!r} is not known; possible: auto, cpu, cuda, interpreter", "device")
