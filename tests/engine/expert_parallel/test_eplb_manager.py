"""EPLB: when ranks look at their load, and how experts then move, before the same step on all ranks or not at all."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from starling_engine.config import EplbConfig, WorkerConfig
from starling_engine.errors import WeightError
from starling_engine.expert_parallel.eplb_manager import EplbManager
from starling_engine.expert_parallel.load import LoadWindow
from starling_engine.expert_parallel.peers import FindPeers
from starling_engine.expert_parallel.ranks import ExpertRanks
from starling_engine.model_config.moe import MoeConfig, Routing
from starling_engine.parallel.communicator import Communicator
from starling_engine.topology.epoch import Balance, EpochPlan, Rearranged
from starling_engine.topology.placement import Placement, spread
from starling_engine.topology.rendezvous import Rendezvous

from tests.engine.parallel.threads import Join, on_threads

EXPERTS, LAYERS, INTERVAL = 8, 3, 5
SKEWED, EVEN = [30, 30, 1, 1, 1, 1, 1, 1], [7] * EXPERTS
MOE = MoeConfig(layers=tuple(range(LAYERS)), intermediate_size=4, routing=Routing(num_experts=EXPERTS, top_k=2))


@dataclass
class FakeRearrangement:
    """Loads as many layers as the test sets."""

    ranks: ExpertRanks
    rows: tuple[int, ...] = tuple(range(LAYERS))
    num_layers: int = LAYERS
    loaded: int | Exception = 0
    wanted: Placement | None = None
    commits: list[int] = field(default_factory=list)
    cancelled: int = 0

    @property
    def loaded_layers(self) -> int:
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded

    def start(self, placement: Placement, _rank: int, _pause_ratio: float, find_peers: FindPeers) -> None:  # noqa: ARG002
        assert self.wanted is None
        self.wanted = placement

    def commit_layers(self, count: int) -> None:
        assert self.wanted is not None
        for row in self.rows[len(self.commits) and self.commits[-1] : count]:
            self.ranks.set_layer(row, self.wanted.layers[row])
        self.commits.append(count)
        if count == self.num_layers:
            self.wanted = None

    def cancel(self) -> None:
        self.cancelled += 1
        self.wanted = None


class Rank:
    def __init__(self, communicator: Communicator, load: list[int]) -> None:
        self.published: list[Balance | Rearranged] = []
        self.window = LoadWindow(LAYERS, EXPERTS, 100)
        self.ranks = ExpertRanks(EXPERTS, EXPERTS, window=self.window)
        self.ranks.set_placement(communicator, spread(EXPERTS, communicator.shard.count, LAYERS))
        self.rearrangement = FakeRearrangement(self.ranks)
        rearrangement: Any = self.rearrangement
        self.manager = EplbManager(worker_config(), MOE, self.ranks, rearrangement, self.published.append)
        self.steps = 0
        self._load = load

    def step(self, count: int = 1) -> None:
        """Does what `DpSync` does."""
        for _ in range(count):
            vote = self.manager.vote()
            self.steps += 1
            self.manager.act(self.steps, self.ranks.communicator.all_gather(torch.tensor(vote)))
            for row in self.rearrangement.rows:
                held = self.ranks.held(row)
                self.window.add(row, torch.tensor([e for e in held for _ in range(self._load[e])]))

    def find(self) -> None:
        """Waits until the first rank's search has ended, and all have started its placement."""
        self.step(INTERVAL)
        search = self.manager._search
        if search is not None:
            search._thread.join()
        self.step()


def worker_config() -> WorkerConfig:
    needless: dict[str, Any] = dict.fromkeys(
        ("model_path", "device", "dtype", "seed", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"), 0
    )
    eplb = EplbConfig(window=100, interval=INTERVAL, redundant=0, spare=4)
    return WorkerConfig(
        **needless,
        load_format="dummy",
        kv_cache_memory_bytes=None,
        memory_fraction=0.5,
        attention_backend="auto",
        num_threads=1,
        expert_slots=EXPERTS,
        eplb=eplb,
    )


def epoch(number: int) -> EpochPlan:
    return EpochPlan(number=number, cores=(0, 1), dp=0, placement=Placement(EXPERTS, ()), rendezvous=Rendezvous("", 0, "", 1.0))


def join_as(index: int, join: Join, load: list[int] = SKEWED) -> Rank:
    rank = Rank(join("experts", index, 2), load)
    rank.manager.begin_epoch(epoch(1), [])
    return rank


def test_layers_change_over_when_the_last_rank_has_loaded_them() -> None:
    def work(index: int, join: Join) -> Rank:
        rank = join_as(index, join)
        rank.step(INTERVAL - 1)
        assert rank.manager._search is None, "not before the interval is over"
        rank.find()
        assert rank.rearrangement.wanted is not None
        rank.rearrangement.loaded = 1 + index
        rank.step(2)
        assert rank.rearrangement.commits == [1]
        rank.rearrangement.loaded = LAYERS
        rank.step()
        assert rank.rearrangement.wanted is None
        return rank

    first, second = on_threads(2, "gloo", work)
    assert first.rearrangement.commits == second.rearrangement.commits == [1, 3]
    placement = first.ranks.placement
    assert placement is not None and placement == second.ranks.placement
    assert all({0, 1} - {*layer[0]} and {0, 1} - {*layer[1]} for layer in placement.layers), "one of the hot ones each"
    balance, moved = first.published
    assert isinstance(balance, Balance) and balance.now == pytest.approx(33 / 62)
    assert isinstance(moved, Rearranged) and moved.complete and moved.after == pytest.approx(1)
    assert moved.layers == dict(enumerate(placement.layers)) and moved.moved >= 2 * LAYERS
    assert second.published == [], "one publishes for all"


def test_an_even_load_moves_nothing() -> None:
    def work(index: int, join: Join) -> Rank:
        rank = join_as(index, join, EVEN)
        for _ in range(3):
            rank.find()
        return rank

    first, second = on_threads(2, "gloo", work)
    assert first.published[0] == Balance(0, 1.0)
    assert all(isinstance(published, Balance) for published in first.published)
    assert first.ranks.placement == second.ranks.placement == spread(EXPERTS, 2, LAYERS)


def test_another_epoch_stops_it_on_all_ranks_at_one_step() -> None:
    """The command comes to one rank earlier than to the other, with one layer changed over."""

    def work(index: int, join: Join) -> Rank:
        rank = join_as(index, join)
        rank.find()
        rank.rearrangement.loaded = 1
        rank.step()
        rank.rearrangement.loaded = LAYERS
        if index == 1:
            rank.manager.pause()
        rank.step()
        assert rank.rearrangement.commits == [1] and rank.rearrangement.cancelled == 1
        if index == 0:
            rank.manager.pause()
        rank.step(2 * INTERVAL)
        assert rank.rearrangement.wanted is None and rank.rearrangement.cancelled == 1, (
            "nothing begins, and the epoch's own load goes on"
        )
        rank.rearrangement.loaded = 0
        assert rank.manager.resume()
        rank.step()
        rank.rearrangement.commits.clear()
        rank.find()
        assert rank.rearrangement.commits == [] and rank.rearrangement.wanted is not None, "abandoned, it begins again"
        rank.manager.begin_epoch(epoch(2), [])
        assert not rank.window.loads().any()
        return rank

    first, second = on_threads(2, "gloo", work)
    before = spread(EXPERTS, 2, LAYERS).layers
    assert first.ranks.placement is not None and first.ranks.placement == second.ranks.placement
    assert first.ranks.placement.layers[0] != before[0] and first.ranks.placement.layers[1:] == before[1:]
    given_up = first.published[1]
    assert isinstance(given_up, Rearranged) and not given_up.complete and given_up.layers[0] == first.ranks.placement.layers[0]


def test_a_rank_that_cannot_load_gives_up_for_all() -> None:
    def work(index: int, join: Join) -> Rank:
        rank = join_as(index, join)
        rank.find()
        rank.rearrangement.loaded = WeightError("gone") if index else LAYERS
        rank.step()
        assert rank.rearrangement.cancelled == 1 and rank.rearrangement.commits == []
        rank.rearrangement.loaded = 0
        rank.find()
        assert rank.rearrangement.wanted is not None, "it is tried again at the next look"
        return rank

    first, second = on_threads(2, "gloo", work)
    assert first.ranks.placement == second.ranks.placement == spread(EXPERTS, 2, LAYERS)
