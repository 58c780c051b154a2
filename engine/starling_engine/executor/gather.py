"""Replies of all ranks of a core, merged into one. Imports no torch."""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from starling_engine.kv_offload.orders import TierStatus, TransferDone, merge, merge_status
from starling_engine.sleep import MemoryOrderDone, merge_memory_orders
from starling_engine.topology.epoch import Prepared, Switched, merge_prepared, merge_switched
from starling_engine.worker.commands import Reply


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
    MemoryOrderDone: GatherRule(merge_memory_orders),
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
