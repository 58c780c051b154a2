"""The engine's environment variables, all of them read here.

- `STARLING_CACHE`: folder for what is built once and kept (default `~/.cache/starling`).
- `STARLING_NATIVE`: `0` keeps the native CPU kernels off; the torch reference is used instead.
"""

import os
from pathlib import Path


def cache_dir() -> Path:
    """The folder for what is built once and kept between runs. It may not exist yet."""
    configured = os.environ.get("STARLING_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "starling"


def native_enabled() -> bool:
    """Whether the native CPU kernels may be built and loaded."""
    return os.environ.get("STARLING_NATIVE", "1") != "0"
