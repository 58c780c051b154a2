"""Gathers what all ranks of a core send: one result of each step, one reply to each command. Imports no torch."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from starling_engine.errors import RankLost
from starling_engine.kv_offload.orders import TierStatus, TransferDone, merge, merge_status
from starling_engine.sleep import MemoryReply, merge_memory_replies
from starling_engine.step import StepResult
from starling_engine.topology.epoch import Prepared, Switched, merge_prepared, merge_switched
from starling_engine.worker.commands import Reply

ALIKE_SECONDS = 3.0
"""Time in which all ranks have to report that a step failed, once one has."""


def _alone(_: Reply) -> int:
    return 0


class GatherRule(NamedTuple):
    """Replies of one type: `merge` gets those of all ranks, in the order of ranks.

    key      distinguishes commands that are answered at the same time; without it one is answered after the other
    standing a rank's last reply stays valid, and every new one gives another merged reply
    """

    merge: Callable[[list[Any]], Reply]
    key: Callable[[Any], int] = _alone
    standing: bool = False


RULES: Mapping[type[Reply], GatherRule] = {
    TransferDone: GatherRule(merge, key=attrgetter("job")),
    TierStatus: GatherRule(merge_status, standing=True),
    MemoryReply: GatherRule(merge_memory_replies),
    Prepared: GatherRule(merge_prepared, key=attrgetter("number")),
    Switched: GatherRule(merge_switched, key=attrgetter("number")),
}
"""Types that all ranks reply. Other types need one rank alone: it speaks for its core, or for its stage."""


class ReplyGather:
    """Collects replies until all `ranks` have given theirs."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._partial: dict[tuple[type, int], dict[int, Reply]] = {}
        """Replies by rank, for each type and key."""

    def add(self, rank: int, reply: Reply) -> Reply | None:
        """Returns the merged reply once all ranks have replied, else None."""
        rule = RULES.get(type(reply))
        if rule is None:
            return reply
        key = type(reply), rule.key(reply)
        replies = self._partial.setdefault(key, {})
        replies[rank] = reply
        if len(replies) < self._ranks:
            return None
        if not rule.standing:
            del self._partial[key]
        return rule.merge([replies[number] for number in range(self._ranks)])


class StepResults:
    """Gives results in the order of the plans.

    A step has failed when all `ranks` have reported so; a later step's result may have come by then.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._submitted: deque[int] = deque()
        self._ended: dict[int, StepResult] = {}
        self._failed: dict[int, dict[int, str]] = {}
        """Errors by step and rank. A step that failed on all ranks alike is the scheduler's to pin on a request; after one that
        failed on some, the ranks' exchanges no longer match."""
        self._failed_since = 0.0

    def __len__(self) -> int:
        """Returns the number of steps in flight."""
        return len(self._submitted)

    @property
    def ready(self) -> bool:
        """True when the oldest step's result is there.

        False while it is not known whether all ranks failed alike: results of later steps may be of exchanges that no longer match.
        """
        return not self._failed and bool(self._submitted) and self._submitted[0] in self._ended

    def submit(self, step: int) -> None:
        self._submitted.append(step)

    def pop(self) -> StepResult:
        """Removes and returns the oldest step's result, which is `ready`."""
        return self._ended.pop(self._submitted.popleft())

    def add(self, rank: int, result: StepResult) -> None:
        """Adds the result of the rank that samples, or the failure of any."""
        if result.error is not None and not self._failed_alike(rank, result.step_id, result.error):
            return
        self._ended[result.step_id] = result

    def check_alike(self, patience: float = ALIKE_SECONDS) -> None:
        """Raises RankLost where a step failed on some ranks alone, and `patience` seconds have passed."""
        if self._failed and time.monotonic() - self._failed_since >= patience:
            step, failed = next(iter(self._failed.items()))
            rank, error = next(iter(failed.items()))
            raise RankLost(f"rank {rank} failed at step {step}, and not all others did: {error}")

    def _failed_alike(self, rank: int, step: int, error: str) -> bool:
        """Adds a rank's failure; returns whether all ranks have failed at the step now."""
        failed = self._failed.setdefault(step, {})
        if not failed:
            self._failed_since = time.monotonic()
        failed[rank] = error
        if len(failed) < self._ranks:
            return False
        del self._failed[step]
        return True
