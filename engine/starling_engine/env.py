"""All environment variables of the engine.

- `STARLING_CACHE`: folder for what is built once and used again (default `~/.cache/starling`).
- `STARLING_CPU_ISA`: the instruction set that the native kernels use, if not the best that the CPU has.
- `STARLING_KERNELS`: folder of native CPU kernels that were built ahead, for a machine without a compiler (none by default).
- `STARLING_NATIVE`: `0` keeps the native CPU kernels off; the torch reference is used instead.
"""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Returns the folder for what is built once and used again. It may not exist yet."""
    configured = os.environ.get("STARLING_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "starling"


def cpu_isa() -> str | None:
    """Returns the name of the instruction set that the native kernels have to use; None for the best."""
    return os.environ.get("STARLING_CPU_ISA") or None


def kernels_dir() -> Path | None:
    """Returns the folder of native kernels that were built ahead, as an image has it."""
    configured = os.environ.get("STARLING_KERNELS")
    return Path(configured) if configured else None


def native_enabled() -> bool:
    """Returns whether the native CPU kernels may be built and loaded."""
    return os.environ.get("STARLING_NATIVE", "1") != "0"
