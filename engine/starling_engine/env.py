"""The engine's environment variables, all of them read here.

- `STARLING_CACHE`: folder for what is built once and kept (default `~/.cache/starling`).
- `STARLING_KERNELS`: folder of native CPU kernels that were built ahead, for a machine without a compiler (none by default).
- `STARLING_NATIVE`: `0` keeps the native CPU kernels off; the torch reference is used instead.
"""

import os
from pathlib import Path


def cache_dir() -> Path:
    """The folder for what is built once and kept between runs. It may not exist yet."""
    configured = os.environ.get("STARLING_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "starling"


def kernels_dir() -> Path | None:
    """The folder of native kernels that were built ahead, as an image has it."""
    configured = os.environ.get("STARLING_KERNELS")
    return Path(configured) if configured else None


def native_enabled() -> bool:
    """Whether the native CPU kernels may be built and loaded."""
    return os.environ.get("STARLING_NATIVE", "1") != "0"
