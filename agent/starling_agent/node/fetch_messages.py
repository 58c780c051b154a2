"""Messages of the downloading process on its standard output: one JSON object a line."""

import msgspec


class FetchProgress(msgspec.Struct, frozen=True, tag="step"):
    """Bytes done, and in total (0: not known). `waiting`: another process of this machine downloads the same."""

    done: int = 0
    total: int = 0
    waiting: bool = False
    verifying: bool = False


class Fetched(msgspec.Struct, frozen=True, tag="done"):
    """Success. `result` is the folder, or with `resolve` the commit."""

    result: str


class FetchFailed(msgspec.Struct, frozen=True, tag="failed"):
    message: str
    fatal: bool


FetchMessage = FetchProgress | Fetched | FetchFailed
