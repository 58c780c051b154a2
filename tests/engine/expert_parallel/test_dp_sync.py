"""DP sync: which ranks run and which serve, when all sleep, and how one epoch follows another."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import zmq
from starling_engine.expert_parallel.dp_sync import DpSync, SyncDecision
from starling_engine.expert_parallel.epoch import Epoch
from starling_engine.parallel.gloo import serve_store
from starling_engine.topology.epoch import EpochPlan
from starling_engine.topology.layout import Coordinates, ParallelLayout
from starling_engine.topology.placement import Placement
from starling_engine.topology.rendezvous import Rendezvous

HOST = "127.0.0.1"
TIMEOUT = 20.0


@dataclass
class Rank:
    steps: DpSync
    decisions: list[SyncDecision] = field(default_factory=list)

    def work(self, plans: int) -> None:
        """Steps with its plans until it has none and may sleep."""
        while self.steps.needs_sync(has_plan=bool(plans)):
            decision = self.steps.sync(has_plan=bool(plans))
            self.decisions.append(decision)
            plans -= decision is SyncDecision.RUN

    def sleep(self) -> None:
        """Waits until another rank wakes it."""
        assert self.steps.epoch is not None
        assert self.steps.epoch.wakeup.socket.poll(TIMEOUT * 1000), "no rank called"

    def pop_decisions(self) -> list[SyncDecision]:
        decisions, self.decisions = self.decisions, []
        return decisions


class Group:
    """Ranks as threads of this process, each with its own part of every epoch."""

    def __init__(self, size: int, tensor: int = 1) -> None:
        self.layout = ParallelLayout(tensor=tensor)
        self.store = serve_store(HOST, TIMEOUT)
        self.ranks = [Rank(DpSync()) for _ in range(size)]
        self.pool = ThreadPoolExecutor(max_workers=8)
        self.context = zmq.Context()

    def run_all(self, *calls: Callable[[], object]) -> list[object]:
        futures: list[Future[object]] = [self.pool.submit(call) for call in calls]
        return [future.result(TIMEOUT) for future in futures]

    def prepare(self, number: int, members: list[int], leavers: list[int] = []) -> None:  # noqa: B006 - never changed
        data = len(members) // self.layout.tensor

        def plan(dp: int | None) -> EpochPlan:
            place = Rendezvous(HOST, self.store.port, HOST, TIMEOUT)
            return EpochPlan(number=number, cores=tuple(range(data)), dp=dp, placement=Placement(1, ()), rendezvous=place)

        def join(at: int, member: int) -> None:
            own = plan(at // self.layout.tensor)
            place = Coordinates(0, 0, at % self.layout.tensor)
            epoch = Epoch(own, self.layout, place, self.context, lambda: None, "")
            self.ranks[member].steps.prepare(own, epoch)

        self.run_all(*(lambda at=at, m=m: join(at, m) for at, m in enumerate(members)))
        for leaver in leavers:
            self.ranks[leaver].steps.prepare(plan(None), None)

    def commit(self, number: int, ranks: list[int]) -> None:
        for rank in ranks:
            self.ranks[rank].steps.commit(number)

    def work(self, plans: dict[int, int]) -> list[list[SyncDecision]]:
        """Runs these ranks' plans, and returns the decisions of each."""
        self.run_all(*(lambda r=rank, n=count: self.ranks[r].work(n) for rank, count in plans.items()))
        return [self.ranks[rank].pop_decisions() for rank in plans]

    def close(self) -> None:
        self.pool.shutdown()
        for rank in self.ranks:
            rank.steps.abandon()
            if rank.steps.epoch is not None:
                rank.steps.epoch.close()
        self.context.term()


@pytest.fixture
def make() -> Iterator[Callable[..., Group]]:
    groups: list[Group] = []

    def make(size: int, tensor: int = 1) -> Group:
        groups.append(Group(size, tensor))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


def serving(group: Group, members: list[int]) -> Group:
    group.prepare(1, members)
    group.commit(1, members)
    group.work(dict.fromkeys(members, 0))
    return group


RUN, SERVE, SWITCHED = SyncDecision.RUN, SyncDecision.SERVE, SyncDecision.SWITCHED


def test_a_first_step_is_taken_by_all_and_then_all_sleep(make: Callable[..., Group]) -> None:
    group = make(3)
    group.prepare(1, [0, 1, 2])
    group.commit(1, [0, 1, 2])
    assert group.work({0: 0, 1: 0, 2: 0}) == [[SERVE]] * 3


def test_idle_ranks_serve_while_another_works_and_sleep_at_the_same_step(make: Callable[..., Group]) -> None:
    group = serving(make(3), [0, 1, 2])

    def idle(rank: Rank) -> None:
        rank.sleep()
        rank.work(0)

    group.run_all(lambda: group.ranks[1].work(3), lambda: idle(group.ranks[0]), lambda: idle(group.ranks[2]))
    assert group.ranks[1].pop_decisions() == [RUN, RUN, RUN, SERVE]
    assert group.ranks[0].pop_decisions() == group.ranks[2].pop_decisions() == [SERVE] * 4


def test_a_call_to_a_step_that_is_over_wakes_no_rank(make: Callable[..., Group]) -> None:
    group = serving(make(2), [0, 1])
    first, second = group.ranks
    assert first.steps.epoch is not None
    first.steps.epoch.wakeup.wake(0)
    second.sleep()
    assert not second.steps.needs_sync(has_plan=False)


def test_ranks_of_one_core_run_a_plan_when_all_have_it(make: Callable[..., Group]) -> None:
    group = serving(make(4, tensor=2), [0, 1, 2, 3])
    late = threading.Event()

    def behind(rank: Rank) -> None:
        """Gets its plan a step later than the other rank of its core."""
        rank.sleep()
        assert rank.steps.needs_sync(has_plan=False)
        rank.decisions.append(rank.steps.sync(has_plan=False))
        late.set()
        rank.work(1)

    def idle(rank: Rank) -> None:
        rank.sleep()
        rank.work(0)

    group.run_all(
        lambda: group.ranks[0].work(1),
        lambda: behind(group.ranks[1]),
        lambda: idle(group.ranks[2]),
        lambda: idle(group.ranks[3]),
    )
    assert late.is_set()
    assert group.ranks[0].pop_decisions() == group.ranks[1].pop_decisions() == [SERVE, RUN, SERVE]
    assert group.ranks[2].pop_decisions() == group.ranks[3].pop_decisions() == [SERVE] * 3


def test_all_switch_at_one_step_and_a_joiner_waits_for_them(make: Callable[..., Group]) -> None:
    group = serving(make(3), [0, 1])
    group.prepare(2, [0, 1, 2])
    group.commit(2, [2])
    assert group.ranks[2].steps.epoch is not None
    joiner = group.pool.submit(group.ranks[2].work, 0)
    assert not joiner.done()
    group.commit(2, [0])
    waiting = group.pool.submit(group.ranks[0].work, 1)
    group.ranks[1].sleep()
    assert group.ranks[1].steps.needs_sync(has_plan=False)
    assert group.ranks[1].steps.sync(has_plan=False) is SERVE, "it may not switch before all have committed"
    group.commit(2, [1])
    group.ranks[1].work(2)
    for rank in (joiner, waiting):
        rank.result(TIMEOUT)
    assert [rank.steps.epoch.plan.number for rank in group.ranks if rank.steps.epoch] == [2, 2, 2]
    assert group.ranks[1].pop_decisions().count(RUN) == 2
    assert SWITCHED in group.ranks[0].pop_decisions()


def test_a_rank_that_leaves_is_in_no_epoch(make: Callable[..., Group]) -> None:
    group = serving(make(3), [0, 1, 2])
    group.prepare(2, [0, 1], leavers=[2])
    group.commit(2, [0, 1, 2])
    group.work({0: 1, 1: 0, 2: 0})
    assert group.ranks[2].steps.epoch is None
    assert not group.ranks[2].steps.needs_sync(has_plan=True)
    assert all(rank.steps.epoch is not None and rank.steps.epoch.plan.data == 2 for rank in group.ranks[:2])


def test_what_was_prepared_can_be_abandoned(make: Callable[..., Group]) -> None:
    group = serving(make(3), [0, 1])
    group.prepare(2, [0, 1, 2])
    for rank in group.ranks:
        rank.steps.abandon()
    group.prepare(3, [0, 1, 2])
    group.commit(3, [0, 1, 2])
    group.work({0: 1, 1: 1, 2: 1})
    assert all(rank.steps.epoch is not None and rank.steps.epoch.plan.number == 3 for rank in group.ranks)
