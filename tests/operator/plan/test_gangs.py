"""Groups of two services that wait for each other's nodes: one gives its nodes back, and in the end both have served."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from starling_operator.plan.gangs import GangRelease, gang_release, waiting_gangs
from starling_operator.plan.observed import Gang, Observed

from tests.operator.plan.building import NOW, SETTINGS, make_observed, make_pod, pending
from tests.operator.plan.world import PAIRS, Member, World

OWN, OTHER = ("prod", "chat"), ("blue", "talk")
PATIENCE = SETTINGS.gang_patience


def gang(service: tuple[str, str], age: float, scheduled: int = 1) -> Gang:
    return Gang(service, f"{service[1]}-aaaaaaa-0", NOW - age, scheduled)


def released(*gangs: Gang, released_ago: float | None = None) -> GangRelease:
    return gang_release(make_observed(gangs=gangs), 0.0 if released_ago is None else NOW - released_ago)


@pytest.mark.parametrize(
    ("gangs", "gone"),
    [
        ([gang(OWN, 9 * PATIENCE)], False),
        ([gang(OWN, PATIENCE - 1), gang(OTHER, PATIENCE + 9)], False),
        ([gang(OWN, PATIENCE), gang(OTHER, PATIENCE + 9)], True),
        ([gang(OWN, PATIENCE + 9), gang(OTHER, PATIENCE)], False),
        ([gang(OWN, 2 * PATIENCE), gang(OTHER, 1)], True),
        ([gang(OWN, 2 * PATIENCE), gang(OTHER, 1, scheduled=0)], True),
        ([gang(OWN, PATIENCE), gang(OTHER, PATIENCE + 9, scheduled=0)], False),
        ([gang(OWN, 9 * PATIENCE, scheduled=0), gang(OTHER, 9 * PATIENCE)], False),
    ],
    ids=[
        "alone",
        "later, in time",
        "later",
        "first",
        "first, twice the time",
        "first, one without nodes",
        "none with nodes first",
        "no nodes",
    ],
)
def test_who_is_later_lets_go_first(gangs: Sequence[Gang], gone: bool) -> None:
    assert bool(released(*gangs).groups) == gone


@pytest.mark.parametrize(
    ("released_ago", "scheduled", "holds"), [(None, 1, False), (1.0, 1, True), (1.0, 0, False), (2 * PATIENCE, 1, False)]
)
def test_a_group_that_released_its_nodes_waits_for_the_other(released_ago: float | None, scheduled: int, holds: bool) -> None:
    assert bool(released(gang(OTHER, 5, scheduled), released_ago=released_ago).hold) == holds


def test_a_gang_that_waits_has_pods_without_a_node_and_serves_nobody() -> None:
    half = [make_pod(number=0, ready=False), make_pod(number=1, **pending())]
    assert waiting_gangs(OWN, half) == [Gang(OWN, "chat-aaaaaaa-0", NOW - 1000, 1)]
    assert waiting_gangs(OWN, half[1:]) == waiting_gangs(OWN, [make_pod(), half[1]]) == waiting_gangs(OWN, half[:1]) == []


@dataclass
class Tenant(World):
    """Service in a cluster that it shares with others. `room`: pods that the cluster's nodes can hold."""

    namespace: str = "prod"
    room: int = 2
    others: list["Tenant"] = field(default_factory=list)

    def observe(self) -> Observed:
        seen = super().observe()
        gangs = [gang for each in (self, *self.others) for gang in waiting_gangs((each.namespace, "chat"), each.seen())]
        return replace(seen, service=replace(seen.service, namespace=self.namespace), gangs=tuple(gangs))

    def seen(self) -> Sequence[object]:
        return World.observe(self).pods

    def tick(self, seconds: float = 1.0) -> None:
        self.node_slots = self.room - sum(member.scheduled for other in self.others for member in other.pods)
        super().tick(seconds)


def test_two_services_with_room_for_one_group_are_served_one_after_the_other() -> None:
    blue, green = (Tenant(PAIRS, namespace=name) for name in ("blue", "green"))
    blue.others, green.others = [green], [blue]
    for each in (blue, green):
        each.reconcile()
        each.room = 0
        each.tick()
        schedule(each.pods[0])
        each.room = 2
    run([blue, green], PATIENCE - 30)
    assert served(blue) == served(green) == 0, "each has one node, and waits for the other's"
    run([blue, green], 120)
    assert (served(blue), served(green)) == (1, 0) or (served(blue), served(green)) == (0, 1)
    first, second = (blue, green) if served(blue) else (green, blue)
    assert second.event_reasons("NodesReleased") == ["NodesReleased"]
    assert second.condition("Ready")[0] == "False"
    run([blue, green], 3 * PATIENCE)
    assert served(first) == 1, "who serves is left in peace"
    first.edit({"suspend": True})
    run([blue, green], 120)
    assert served(second) == 1


def schedule(member: Member) -> None:
    member.scheduled, member.phase = True, "Running"


def served(world: World) -> int:
    return len(world.available())


def run(worlds: Sequence[World], seconds: float, step: float = 5.0) -> None:
    for _ in range(int(seconds / step)):
        for world in worlds:
            world.reconcile()
            world.tick(step)
