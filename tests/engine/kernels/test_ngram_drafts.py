"""Drafts that a device makes are those of the host's prompt lookup: by the kernel, and by torch."""

import random
from collections.abc import Sequence

import pytest
import torch
from starling_engine.config import SpeculativeConfig
from starling_engine.kernels import ngram_drafts as kernel
from starling_engine.kernels import prompt_lookup as reference
from starling_engine.platforms.triton_support import INTERPRETED
from starling_engine.spec_decode import proposers, token_index
from starling_engine.spec_decode.proposers import NgramProposer
from starling_engine.step import FOLLOWS, OWN
from starling_engine.worker.device.device_drafter import select_draft_op

from tests.engine.spec_decode.test_proposers import request_of

from .compiled import compiled

MOST = 5
SPARE = 2
"""Slots that have no row, and the token ids behind the step's."""


def _sequences(rng: random.Random, longest: int) -> list[list[int]]:
    """Returns sequences of which much, little or nothing repeats, also of one token, and of the longest."""
    lengths = [1, 2, 3, longest, *(rng.randint(1, longest) for _ in range(20))]
    return [rng.choices(range(rng.choice([1, 2, 4, 50])), k=length) for length in lengths]


def _ids(rows: Sequence[tuple[list[int], int]], rng: random.Random) -> list[int]:
    """Returns a step's ids: each row's last token and its drafts. Of a row with none, the token may look as if it were OWN."""
    return [token for text, count in rows for token in (rng.choice([text[-1], OWN]), *[OWN] * count)]


@pytest.mark.parametrize(("shortest", "longest"), [(2, 5), (1, 3), (3, 3), (4, 40)])
@pytest.mark.parametrize("width", [60, 5000])
def test_they_are_those_of_the_host(
    width: int, shortest: int, longest: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host compares the latest places only, and indexes a prompt in slices: both bounds are lifted here."""
    monkeypatch.setattr(token_index, "MOST_PLACES", 1 << 30)
    monkeypatch.setattr(proposers, "SLICE", 1 << 30)
    rng = random.Random(width + longest)
    rows = [(text, rng.choice([0, 1, 3, MOST])) for text in _sequences(rng, width)]
    slots = rng.sample(range(len(rows) + SPARE), len(rows))
    tokens = torch.full((len(rows) + SPARE, width), 1, dtype=torch.int32)
    lengths = torch.full((len(rows) + SPARE,), width)
    starts = []
    for slot, (text, _) in zip(slots, rows, strict=True):
        tokens[slot, : len(text)] = torch.tensor(text)
        follows = rng.random() < 0.7
        starts.append(FOLLOWS if follows else len(text) - 1)
        lengths[slot] = len(text) if follows else 1
    ids = [*_ids(rows, rng), 0]
    query_start = [0]
    for _, count in rows:
        query_start.append(query_start[-1] + 1 + count)

    config = SpeculativeConfig(method="ngram", prompt_lookup_min=shortest, prompt_lookup_max=longest)
    expected = list(ids)
    for first, (text, count) in zip(query_start, rows, strict=False):
        expected[first + 1 : first + 1 + count] = NgramProposer(config).propose(request_of(text), count) or [OWN] * count
    assert OWN in expected and expected != ids, "some have a place and others none"

    for op in (kernel.ngram_drafts, reference.ngram_drafts):
        made = torch.tensor(ids, device=device)
        op(
            made,
            torch.tensor(query_start, dtype=torch.int32, device=device),
            torch.tensor(slots, device=device),
            torch.tensor(starts, device=device),
            lengths.to(device),
            tokens.to(device),
            shortest=shortest,
            longest=longest,
            most=MOST,
        )
        assert made[:-1].tolist() == expected[:-1], op.__module__


def test_drafts_that_the_host_gave_and_prompts_stay(device: torch.device) -> None:
    """A prompt of four tokens; a row with given drafts; one with OWN drafts, behind the three tokens that it computes."""
    text = torch.tensor([[1, 2, 3, 1, 2, 3, 1]] * 3, dtype=torch.int32, device=device)
    for op in (kernel.ngram_drafts, reference.ngram_drafts):
        ids = torch.tensor([1, 2, 3, 1, 1, 7, 8, 2, 3, 1, OWN, OWN, 0], device=device)
        query_start = torch.tensor([0, 4, 7, 12], dtype=torch.int32, device=device)
        slots, starts = torch.arange(3, device=device), torch.tensor([0, FOLLOWS, 4], device=device)
        op(ids, query_start, slots, starts, torch.full((3,), 7, device=device), text, shortest=2, longest=5, most=3)
        assert ids[:-1].tolist() == [1, 2, 3, 1, 1, 7, 8, 2, 3, 1, 2, 3]


def test_it_is_the_op_where_triton_runs(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setenv(INTERPRETED, "1")
    assert select_draft_op(device) is kernel.ngram_drafts
    monkeypatch.delenv(INTERPRETED)
    assert select_draft_op(torch.device("cpu")) is reference.ngram_drafts


def launch(rows: int, width: int) -> None:
    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    kernel.ngram_drafts(
        *(empty(rows * 6 + 1), empty(rows + 1, dtype=torch.int32), empty(rows), empty(rows), empty(257)),
        empty(257, width, dtype=torch.int32),
        shortest=2,
        longest=5,
        most=7,
    )


def test_compiles_without_spills() -> None:
    (found,) = compiled(launch, 64, 32769)
    assert found.stack == 0
