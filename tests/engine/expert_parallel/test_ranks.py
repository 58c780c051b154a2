"""Ranks that share experts, each with tokens of its own: every one gets what transformers gives, whoever holds what."""

import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from starling_engine.attention.mla_torch import TorchMla
from starling_engine.attention.torch_paged import TorchPagedAttention
from starling_engine.errors import ConfigError, WeightError
from starling_engine.expert_parallel.load import LoadWindow
from starling_engine.expert_parallel.ranks import ExchangeName, ExpertRanks
from starling_engine.expert_parallel.rearrangement import Rearrangement
from starling_engine.layers.linear_select import select_linear_method
from starling_engine.model_config.config import load_model_config
from starling_engine.models.decoder import Decoder
from starling_engine.parallel.communicator import ALONE, Communicator
from starling_engine.topology.placement import Placement, regroup, spread
from starling_engine.weights.loader import Checkpoint, load_weights
from starling_engine.weights.weight_slot import WeightSlot

from tests.engine.checkpoints import PROMPT, VARIANTS, Reference, make_reference
from tests.engine.paged_driver import PagedDriver
from tests.engine.parallel.test_loading import Silent
from tests.engine.parallel.threads import KINDS, Join, on_threads

CPU = torch.device("cpu")
TOLERANCE = 1e-4
BOTH: list[ExchangeName] = ["all_to_all", "all_gather"]


def test_a_rank_that_stands_by_is_not_recorded() -> None:
    """The recording would leave out what it will exchange with others."""
    assert not ExpertRanks(8, 8).capturable


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    names = ("qwen3-moe", "deepseek-v3", "qwen3-moe-some-plain")
    return {name: make_reference(tmp_path_factory.mktemp("checkpoint"), VARIANTS[name]) for name in names}


@dataclass
class Rank:
    """One rank's model, and the logits of the one sequence that it has run so far."""

    model: Decoder
    ranks: ExpertRanks
    driver: PagedDriver
    logits: list[torch.Tensor] = field(default_factory=list)

    def step(self, prompt: list[int], count: int) -> None:
        """The next `count` tokens, or what the others need of it."""
        if not count:
            self.model.forward_without_tokens()
            return
        start = self.driver.lengths[0]
        self.logits += self.driver.run([(0, prompt[start : start + count])])

    def rearrangement(self, folder: Path) -> Rearrangement:
        return Rearrangement(self.ranks, self.model.experts, Checkpoint(folder))


def build(folder: Path, ranks: ExpertRanks, tensor: Communicator = ALONE, dtype: torch.dtype = torch.float32) -> Rank:
    config = load_model_config(folder)
    backend = TorchMla() if config.mla else TorchPagedAttention()
    model = Decoder(config, dtype, CPU, select_linear_method(dtype, CPU), backend, tensor=tensor, expert_ranks=ranks)
    load_weights(model, folder)
    return Rank(model, ranks, PagedDriver(model, dtype, block_size=8))


def first_placement(folder: Path, ranks: int, redundant: int = 0) -> Placement:
    moe = load_model_config(folder).moe
    assert moe is not None
    return spread(moe.num_experts, ranks, len(moe.layers), redundant=redundant)


# What each data parallel rank runs in each step: all of them, some, the tokens of one alone.
CHUNKS = [[13, 27, 0, 0], [1, 0, 5, 34], [20, 1, 0, 19], [0, 0, 40, 0]]


@pytest.mark.parametrize("exchange", BOTH)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "data", "tensor", "redundant"),
    [
        ("qwen3-moe", 2, 1, 0),
        ("deepseek-v3", 3, 1, 0),
        ("qwen3-moe-some-plain", 4, 1, 5),
        ("deepseek-v3", 2, 2, 3),
        ("qwen3-moe", 1, 2, 0),
    ],
)
def test_tokens_of_each_rank_meet_their_experts(
    name: str, data: int, tensor: int, redundant: int, kind: str, exchange: ExchangeName, references: dict[str, Reference]
) -> None:
    reference = references[name]
    placement = first_placement(reference.folder, data * tensor, redundant)

    def work(index: int, join: Join) -> torch.Tensor:
        group = join(f"tensor/{index // tensor}", index % tensor, tensor)
        ranks = ExpertRanks(placement.num_experts, placement.slots, group, exchange)
        ranks.set_placement(join("experts", index, data * tensor), placement)
        rank = build(reference.folder, ranks, group)
        for count in CHUNKS[index // tensor]:
            rank.step(reference.prompt, count)
        return torch.cat(rank.logits)

    for logits in on_threads(data * tensor, kind, work):
        torch.testing.assert_close(logits, reference.logits[:PROMPT], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("exchange", BOTH)
def test_a_chunk_that_ends_nowhere_leaves_the_last_layer_without_tokens(
    exchange: ExchangeName, references: dict[str, Reference]
) -> None:
    reference = references["qwen3-moe"]
    placement = first_placement(reference.folder, 2)

    def work(index: int, join: Join) -> torch.Tensor:
        ranks = ExpertRanks(placement.num_experts, placement.slots, ALONE, exchange)
        ranks.set_placement(join("experts", index, 2), placement)
        rank = build(reference.folder, ranks)
        rank.driver._step([(0, reference.prompt[:9])], torch.empty(0, dtype=torch.int64))
        return rank.driver.run_to_last([(0, reference.prompt[9:])])

    for logits in on_threads(2, "gloo", work):
        torch.testing.assert_close(logits[0], reference.logits[PROMPT - 1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_group_is_resized_between_steps(kind: str, references: dict[str, Reference]) -> None:
    """4 -> 2 -> 3: ranks load what they lack while they serve, and go on with their sequences in the next epoch."""
    reference = references["qwen3-moe"]
    first = first_placement(reference.folder, 4)
    placements = [first, regroup(first, 2), regroup(regroup(first, 2), 3)]

    def stand_by() -> Rank:
        rank = build(reference.folder, ExpertRanks(8, 8))
        rank.driver.run([(0, reference.prompt[:1])])  # to warm up, alone and without experts
        rank.driver.lengths[0] = 0
        return rank

    def work(index: int, join: Join) -> list[torch.Tensor]:
        rank, done = stand_by(), []
        for epoch, placement in enumerate(placements):
            serving, moves = rank.ranks.placement is not None, rank.rearrangement(reference.folder)
            if index < placement.ranks:
                moves.start(placement, index)
                communicator = join(f"experts/{epoch}", index, placement.ranks)
            if serving:
                rank.step(reference.prompt, 3)  # of the old epoch, while the new one is prepared
            if index < placement.ranks:
                wait(moves)
                moves.commit(communicator)
                rank.step(reference.prompt, 5 + index)
                assert [set(experts.reserved) for experts in rank.model.experts.values()] == [*map(set, placement.held(index))]
            elif serving:  # its process ends; another one may come in its place
                done.append(torch.cat(rank.logits))
                rank = stand_by()
        return [*done, torch.cat(rank.logits)] if rank.logits else done

    sequences = [logits for found in on_threads(4, kind, work) for logits in found]
    assert [len(logits) for logits in sequences] == [3 * 5 + 6, 3 * 6 + 6, 7 + 3, 7, 8 + 3]
    for logits in sequences:
        torch.testing.assert_close(logits, reference.logits[: len(logits)], atol=TOLERANCE, rtol=0)


def test_layers_change_over_one_after_another(references: dict[str, Reference]) -> None:
    """Checks that the output does not depend on where the experts are, among the same ranks."""
    reference = references["deepseek-v3"]
    before = first_placement(reference.folder, 2)
    after = Placement(8, (((0, 2, 3, 4, 6), (1, 3, 5, 7)), ((4, 5, 6, 7), (0, 1, 2, 3))))

    def work(index: int, join: Join) -> torch.Tensor:
        ranks = ExpertRanks(8, 8)
        ranks.set_placement(join("experts", index, 2), before)
        rank = build(reference.folder, ranks)
        moves = rank.rearrangement(reference.folder)
        rank.step(reference.prompt, 9 + index)
        moves.start(after, index)
        wait(moves)
        assert moves.progress[0] == moves.progress[1] == 2 + 4
        rank.step(reference.prompt, 7 - index)
        moves.commit_layers(1)
        assert ranks.placement == Placement(8, (after.layers[0], before.layers[1]))
        rank.step(reference.prompt, 8 + index)
        moves.commit_layers(2)
        assert ranks.placement == after and [len(e.reserved) for e in rank.model.experts.values()] == [*map(len, after.held(index))]
        rank.step(reference.prompt, PROMPT - rank.driver.lengths[0])
        return torch.cat(rank.logits)

    for logits in on_threads(2, "gloo", work):
        torch.testing.assert_close(logits, reference.logits[:PROMPT], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("exchange", BOTH)
@pytest.mark.parametrize("layout", [(2, 1), (1, 2), (2, 2)], ids=str)
def test_every_pair_of_token_and_expert_is_counted_once(
    layout: tuple[int, int], exchange: ExchangeName, references: dict[str, Reference]
) -> None:
    """The ranks' counts add up to what one rank counts; copies share the load of an expert."""
    reference, (data, tensor) = references["deepseek-v3"], layout
    count = data * tensor

    def work(index: int, join: Join) -> torch.Tensor:
        window = LoadWindow(2, 8, 1000)
        group = join(f"tensor/{index // tensor}", index % tensor, tensor)
        ranks = ExpertRanks(8, 8, group, exchange, window=window)
        ranks.set_placement(join("experts", index, count), spread(8, count, 2, redundant=8 if count > 1 else 0))
        run_slowly(ranks, reference, group)
        return window.loads()

    window = LoadWindow(2, 8, 1000)
    alone = ExpertRanks(8, 8, window=window)
    alone.set_placement(ALONE, spread(8, 1, 2))
    run_slowly(alone, reference)
    expected = window.loads() * data
    assert expected.sum(1).tolist() == [3 * PROMPT * data] * 2
    loads = on_threads(count, "gloo", work)
    assert torch.equal(sum(loads), expected)
    if count == 2:  # each has all experts
        assert all(bool((load[expected > 20] > 0.3 * expected[expected > 20]).all()) for load in loads)


def run_slowly(ranks: ExpertRanks, reference: Reference, tensor: Communicator = ALONE) -> None:
    rank = build(reference.folder, ranks, tensor)
    for _ in range(PROMPT):
        rank.step(reference.prompt, 1)


def test_the_window_slides() -> None:
    window = LoadWindow(2, 3, 16)
    ids = torch.tensor([[0, 2], [2, -1]])
    for _ in range(5):
        window.next_step()
        for layer in range(2):
            window.add(layer, ids)
    assert window.loads().tolist() == [[5, 0, 10]] * 2
    for _ in range(40):
        window.next_step()
        for layer in range(2):
            window.add(layer, ids[:, :1])
    loads = window.loads()
    assert loads[0].tolist() == [loads[0, 0], 0, loads[0, 0]] and 14 < loads[0, 0] <= 16
    window.clear()
    assert not window.loads().any()


class Stuck(Checkpoint):
    """Loads one expert, and the next when the test says so."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.waits, self.go_on = threading.Event(), threading.Event()

    def fill(self, slots: Mapping[str, WeightSlot]) -> None:
        super().fill(slots)
        self.waits.set()
        assert self.go_on.wait(60)


def test_a_rearrangement_that_is_given_up_leaves_nothing(references: dict[str, Reference]) -> None:
    reference = references["qwen3-moe"]
    ranks = ExpertRanks(8, 8)
    ranks.set_placement(Silent(0, 2), spread(8, 2, 3))
    rank = build(reference.folder, ranks)
    source = Stuck(reference.folder)
    moves = Rearrangement(ranks, rank.model.experts, source)
    moves.start(spread(8, 1, 3), 0)
    assert source.waits.wait(60)
    assert moves.loaded_layers == 0 and moves.progress[1] == 3 * 4
    threading.Timer(0.1, source.go_on.set).start()
    moves.cancel()
    assert moves.progress[0] == 1
    assert {frozenset(range(4))} == {experts.reserved for experts in rank.model.experts.values()}
    moves.start(spread(8, 1, 3), 0)
    wait(moves)
    moves.commit(ALONE)
    assert {frozenset(range(8))} == {experts.reserved for experts in rank.model.experts.values()}


def test_what_cannot_be_loaded_is_said_and_can_be_given_up(references: dict[str, Reference], tmp_path: Path) -> None:
    reference = references["qwen3-moe"]
    folder = Path(shutil.copytree(reference.folder, tmp_path / "copy"))
    first = spread(8, 2, 3)
    ranks = ExpertRanks(8, 6)
    ranks.set_placement(Silent(0, 2), first)
    rank = build(folder, ranks)
    moves = rank.rearrangement(folder)
    moves.start(spread(8, 1, 3), 0)
    with pytest.raises(ConfigError, match="no free slot for expert 6: all 6"):
        wait(moves)
    moves.cancel()
    assert {frozenset(range(4))} == {experts.reserved for experts in rank.model.experts.values()}
    (folder / "model.safetensors").write_bytes(b"gone")
    moves.start(Placement(8, (((0, 4), (1, 2, 3, 5, 6, 7)),) * 3), 0)
    with pytest.raises(WeightError, match=r"model\.safetensors cannot be read"):
        wait(moves)
    moves.cancel()
    assert {frozenset(range(4))} == {experts.reserved for experts in rank.model.experts.values()}


@pytest.mark.parametrize(
    ("slots", "count", "message"), [(8, 3, "on 2 ranks, of which 3 are here"), (3, 2, "data_parallel_size: 2 ranks .* slots for 3")]
)
def test_a_placement_that_does_not_fit_is_refused(slots: int, count: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ExpertRanks(8, slots).set_placement(Silent(0, count), spread(8, 2, 1))


@pytest.mark.parametrize(
    ("data", "tensor", "chosen"), [(2, 1, "all_to_all (tokens go only"), (2, 2, "all_to_all"), (1, 2, "all_gather (all ranks have")]
)
def test_the_selector_says_what_it_takes_and_why(data: int, tensor: int, chosen: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "starling.parallel"):
        ExpertRanks(8, 8, Silent(0, tensor)).set_placement(Silent(0, data * tensor), spread(8, data * tensor, 1))
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith(f"experts of {data * tensor} ranks: {chosen}")


@pytest.mark.parametrize("exchange", BOTH)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_in_bfloat16(kind: str, exchange: ExchangeName, references: dict[str, Reference]) -> None:
    """Two ranks beside one: parts of a sum are rounded before they are added up, so not to the bit."""
    reference = references["deepseek-v3"]

    def run(ranks: ExpertRanks, prompt: list[int]) -> torch.Tensor:
        rank = build(reference.folder, ranks, dtype=torch.bfloat16)
        rank.step(prompt, 30)
        for _ in prompt[30:]:
            rank.step(prompt, 1)
        return torch.cat(rank.logits)

    def work(index: int, join: Join) -> torch.Tensor:
        ranks = ExpertRanks(8, 5, exchange=exchange)
        ranks.set_placement(join("experts", index, 2), first_placement(reference.folder, 2, 2))
        return run(ranks, [*reference.prompt[index:], *reference.prompt[:index]])

    alone = ExpertRanks(8, 8)
    alone.set_placement(ALONE, first_placement(reference.folder, 1))
    expected = run(alone, reference.prompt)
    found = on_threads(2, kind, work)[0]
    scale = expected.abs().max().item()
    torch.testing.assert_close(found, expected, atol=0.1 * scale, rtol=0)
    assert (found - expected).abs().mean().item() < 0.01 * scale


def wait(moves: Rearrangement) -> None:
    deadline = time.monotonic() + 60
    while moves.loaded_layers < moves.num_layers:
        assert time.monotonic() < deadline
        time.sleep(0.001)
