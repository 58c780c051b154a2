"""Sleep: an engine core gives memory back while nobody needs it. Names and levels are vLLM's. Pure: no torch, no processes.

Level 1 drops the KV cache and moves weights from the device to host memory; where the device is the host they stay. Level 2 drops
both, and the files are read again on waking. A frontend's Sleep or WakeUp goes to a core, whose ranks get ReleaseMemory or
RestoreMemory.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from starling_engine.errors import InvalidRequest

Tag = Literal["weights", "kv_cache"]
"""A part of the memory that can be woken by itself."""
TAGS: tuple[Tag, ...] = get_args(Tag)
LEVELS = (1, 2)
Mode = Literal["refuse", "abort", "wait"]
"""Fate of requests that run: the engine does not sleep, or they end with what they have, or they are finished first."""
ASLEEP = "the engine sleeps; wake it with POST /wake_up, or wake_up()"
SLEEP_EXCLUDES_DP_SYNC = (
    "cores that share experts step together, and one that sleeps would hold the others up; scale the group instead"
)
"""Refusal of sleep to cores with DP sync."""


class Sleep(msgspec.Struct, tag="sleep"):
    """Sleep as soon as nothing runs; no request is taken from now on. Answered by Slept."""

    level: int
    mode: Mode


class WakeUp(msgspec.Struct, tag="wake_up"):
    """Restore what the tags name. Requests are taken when nothing sleeps. Answered by Slept."""

    tags: list[Tag]


class Slept(msgspec.Struct, tag="slept"):
    """The command was carried out, or was `refused` and changed nothing, or ended with an `error`."""

    refused: str | None = None
    error: str | None = None


class SleepState(msgspec.Struct, frozen=True, tag="sleep_state"):
    """State of a core: `asleep` names the memory that it has released, at sleep level `level`; 0 while nothing sleeps.

    It is `taking` requests while nothing sleeps, unless it is about to sleep.
    """

    asleep: tuple[Tag, ...] = ()
    taking: bool = True
    level: int = 0


class ReleaseMemory(msgspec.Struct, tag="release"):
    """A rank gives memory back. No step runs until it has all of it again. Answered by MemoryReply."""

    level: int


class RestoreMemory(msgspec.Struct, tag="restore"):
    """A rank restores what the tags name; memory that it has already stays. Answered by MemoryReply."""

    tags: list[Tag]


class MemoryReply(msgspec.Struct, tag="memory_reply"):
    """A rank has carried out the command, or could not: then memory that it did not reach is as it was."""

    error: str | None = None


SleepCommand = Sleep | WakeUp
MemoryCommand = ReleaseMemory | RestoreMemory


def check_level(level: int) -> int:
    """Raises InvalidRequest."""
    if level not in LEVELS:
        raise InvalidRequest(f"must be 1 (weights are kept in host memory) or 2 (all is dropped), got {level!r}", "level")
    return level


def check_mode(mode: str | None) -> Mode:
    """Returns "refuse" for None. Raises InvalidRequest: keys and values are dropped, so that no request can outlast a sleep."""
    if mode is None:
        return "refuse"
    if mode not in ("abort", "wait"):
        raise InvalidRequest(f"must be abort or wait, or left out to sleep only while no request runs; got {mode[:100]!r}", "mode")
    return "abort" if mode == "abort" else "wait"


def check_tags(tags: Sequence[str] | None) -> list[Tag]:
    """Returns all tags for None, or for an empty list. Raises InvalidRequest."""
    unknown = [tag for tag in tags or () if tag not in TAGS]
    if unknown:
        raise InvalidRequest(f"must be of {', '.join(TAGS)}; got {unknown[0][:100]!r}", "tags")
    return [tag for tag in TAGS if not tags or tag in tags]


def merge_memory_replies(replies: Sequence[MemoryReply]) -> MemoryReply:
    """Merges the replies of all ranks, in their order: each rank that failed is named."""
    errors = [f"rank {rank}: {reply.error}" for rank, reply in enumerate(replies) if reply.error is not None]
    return MemoryReply("; ".join(errors) or None)
