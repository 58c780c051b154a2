"""Plans of an epoch, one for each core. Pure."""

from collections.abc import Sequence
from itertools import groupby

import msgspec

from starling_engine.elastic.members import CoreMember
from starling_engine.topology.epoch import EpochPlan
from starling_engine.topology.placement import Placement
from starling_engine.topology.rendezvous import Rendezvous


def make_plans(number: int, members: Sequence[CoreMember], placement: Placement, patience: float, served: int) -> list[EpochPlan]:
    """Makes each member's plan for epoch `number`, in the order of their data parallel ranks.

    They meet at the first one's store, where each waits `patience` seconds for another. `served` as in `EpochPlan`.
    """
    first, ids = members[0], tuple(member.id for member in members)
    nodes = count_nodes([member.host for member in members])
    return [
        EpochPlan(
            number=number,
            members=ids,
            dp=dp,
            placement=placement,
            rendezvous=Rendezvous(first.host, first.store, member.host, patience),
            nodes=nodes,
            served=served,
        )
        for dp, member in enumerate(members)
    ]


def leaving_plan(plan: EpochPlan) -> EpochPlan:
    """Makes the plan for a core that is not in the epoch of `plan`."""
    return msgspec.structs.replace(plan, dp=None)


def count_nodes(hosts: Sequence[str]) -> int:
    """Counts the nodes of members, where each node has equally many, next to each other; else returns 1."""
    sizes = [len(list(same)) for _, same in groupby(hosts)]
    return len(sizes) if len(set(sizes)) == 1 and len(sizes) == len(set(hosts)) else 1
