"""The release that this process runs."""

from importlib.metadata import PackageNotFoundError, version


def starling_version() -> str:
    """Returns the installed distribution's version; "unknown" in a source tree that was never installed."""
    try:
        return version("starling")
    except PackageNotFoundError:
        return "unknown"
