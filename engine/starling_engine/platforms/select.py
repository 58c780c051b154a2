"""From the argument `device` to a platform."""

import torch

from starling_engine.errors import ConfigError
from starling_engine.platforms.base import Platform
from starling_engine.platforms.cpu import CpuPlatform


def select_platform(device: str) -> Platform:
    """Raises ConfigError for a device that this machine, or this release, does not have."""
    match device:
        case "auto" | "cpu":
            return CpuPlatform()
        case "cuda" if not torch.cuda.is_available():
            raise ConfigError("cuda was asked for, but torch finds no CUDA device here; possible: cpu", "device")
        case "cuda":
            raise ConfigError("cuda is not supported in this release; possible: cpu", "device")
    raise ConfigError(f"{device!r} is not known; possible: auto, cpu", "device")
