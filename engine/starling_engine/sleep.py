"""Sleep: what an engine core gives back while nobody needs it. Names and levels are vLLM's. Pure: no torch, no processes.

Level 1 drops the KV cache and moves weights from the device to host memory; where the device is the host they stay. Level 2 drops
both, and the files are read again on waking. A frontend's Sleep or WakeUp goes to a core, whose ranks get a Release or a Restore.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import msgspec

from starling_engine.errors import InvalidRequest

Tag = Literal["weights", "kv_cache"]
"""What can be woken by itself."""
TAGS: tuple[Tag, ...] = get_args(Tag)
LEVELS = (1, 2)
Mode = Literal["refuse", "abort", "wait"]
"""What becomes of requests that run: the engine does not sleep, or they end with what they have, or they are finished first."""
ASLEEP = "the engine sleeps; wake it with POST /wake_up, or wake_up()"
STEPS_WITH_OTHERS = "cores that share experts step together, and one that sleeps would hold the others up; scale the group instead"


class Sleep(msgspec.Struct, tag="sleep"):
    """Sleep as soon as nothing runs; no request is taken from now on. Answered by Slept, as is WakeUp, with the same `number`."""

    number: int
    level: int
    mode: Mode


class WakeUp(msgspec.Struct, tag="wake_up"):
    """Take again what the tags name. Requests are taken when nothing sleeps."""

    number: int
    tags: list[Tag]


class Slept(msgspec.Struct, tag="slept"):
    """The order was carried out, or else was `refused` and changed nothing, or ended with an `error`."""

    number: int
    refused: str | None = None
    error: str | None = None


class SleepState(msgspec.Struct, frozen=True, tag="sleep_state"):
    """`asleep` is what a core has given back, and `level` the one that it was put to; 0 while that is nothing. It takes requests
    then, unless it is about to sleep.
    """

    asleep: tuple[Tag, ...] = ()
    taking: bool = True
    level: int = 0


class ReleaseMemory(msgspec.Struct, tag="release"):
    """A rank gives memory back. No step runs until it has all of it again."""

    level: int


class RestoreMemory(msgspec.Struct, tag="restore"):
    """A rank takes again what the tags name; what it has already it leaves alone."""

    tags: list[Tag]


class MemoryOrderDone(msgspec.Struct, tag="rested"):
    """A rank has carried out a Release or a Restore, or could not: what the order did not reach is as it was."""

    error: str | None = None


SleepOrder = Sleep | WakeUp
RestOrder = ReleaseMemory | RestoreMemory


def check_level(level: int) -> int:
    """Raises InvalidRequest."""
    if level not in LEVELS:
        raise InvalidRequest(f"must be 1 (weights are kept in host memory) or 2 (all is dropped), got {level!r}", "level")
    return level


def check_mode(mode: str | None) -> Mode:
    """None refuses. Raises InvalidRequest: keys and values are dropped, so that no request can be kept over a sleep."""
    if mode is None:
        return "refuse"
    if mode not in ("abort", "wait"):
        raise InvalidRequest(f"must be abort or wait, or left out to sleep only while no request runs; got {mode[:100]!r}", "mode")
    return "abort" if mode == "abort" else "wait"


def check_tags(tags: Sequence[str] | None) -> list[Tag]:
    """None, or none, are all. Raises InvalidRequest."""
    unknown = [tag for tag in tags or () if tag not in TAGS]
    if unknown:
        raise InvalidRequest(f"must be of {', '.join(TAGS)}; got {unknown[0][:100]!r}", "tags")
    return [tag for tag in TAGS if not tags or tag in tags]


def of_all_ranks(rested: Mapping[int, MemoryOrderDone]) -> MemoryOrderDone:
    """The answers of ranks as one."""
    errors = [f"rank {rank}: {answer.error}" for rank, answer in sorted(rested.items()) if answer.error is not None]
    return MemoryOrderDone("; ".join(errors) or None)
