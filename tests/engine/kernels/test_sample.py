"""Sampling against its torch reference, and how it compiles."""

import itertools

import pytest
import torch
from starling_engine.kernels import filters, sample
from starling_engine.native import reference
from starling_engine.platforms.triton_support import INTERPRETED
from starling_engine.sampling.select import select_sample_op
from torch import Tensor

from .compiled import compiled

SETTINGS = [
    *itertools.product((1.0,), (0, 1, 20, 700), (0.0, 0.3, 0.95, 1.0), (0.0,)),
    *itertools.product((0.3, 5.0), (0, 20), (0.9, 1.0), (0.1,)),
    (0.0, 5, 0.5, 0.5),
    (0.7, 5000, 1.0, 0.0),
    (1.0, 0, 1.0, 1.0),
]
"""temperature, top_k, top_p, min_p."""


def _columns(settings: list[tuple[float, int, float, float]], device: torch.device | str) -> list[Tensor]:
    temperature, top_k, top_p, min_p = (torch.tensor(column, device=device) for column in zip(*settings, strict=True))
    return [temperature.float(), top_k.int(), top_p.float(), min_p.float()]


def _keys(rows: int, device: torch.device) -> list[Tensor]:
    seed = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=torch.Generator().manual_seed(3))
    return [seed.to(device), torch.arange(rows, device=device)]


def _logits(rows: int, vocab: int, spread: float, device: torch.device) -> Tensor:
    logits = spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[:, ::3] = logits[:, ::3].round()  # ties, zeros of both signs too
    return logits.to(device)


def _kept(lowest: Tensor, logits: Tensor, temperature: Tensor) -> Tensor:
    return logits / torch.where(temperature == 0, 1.0, temperature)[:, None] >= lowest[:, None]


@pytest.mark.parametrize(("vocab", "spread"), [(997, 2.0), (1000, 0.0), (4800, 1.0)])
def test_draws_the_reference_tokens(vocab: int, spread: float, device: torch.device) -> None:
    settings = SETTINGS if vocab < 1000 else SETTINGS[::6]
    columns, logits = _columns(settings, device), _logits(len(settings), vocab, spread, device)
    logits[1, : vocab // 2] = float("-inf")
    arguments = (logits, *columns, *_keys(len(settings), device))
    assert torch.equal(sample.sample(*arguments), reference.sample(*arguments))


@pytest.mark.parametrize("spread", [0.02, 6.0])
def test_filters_keep_what_the_reference_keeps(spread: float, device: torch.device) -> None:
    """Checks a flat distribution, whose every group is searched, and one whose few likeliest tokens have nearly all."""
    settings = [
        (1.0, 50, 0.9, 0.0),
        (0.6, 20, 0.95, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.05),
        (1.0, 0, 1.0, 0.0),
        (0.0, 3, 0.2, 0.0),
    ]
    logits = _logits(len(settings), 20_000, spread, device)
    columns = _columns(settings, device)
    lowest = filters.thresholds(logits, *columns)
    expected = reference._kept(logits / torch.where(columns[0] == 0, 1.0, columns[0])[:, None], *columns[1:])
    assert torch.equal(_kept(lowest, logits, columns[0])[:5], expected[:5])
    assert lowest[4:].tolist() == [float("-inf")] * 2, "rows that ask for no filter are not searched"


def test_min_p_keeps_no_neighbour_below(device: torch.device) -> None:
    """The reference's bound is a double: of the floats beside it, only the one above is kept."""
    min_p = torch.linspace(0.05, 0.95, 8, device=device)
    bound = min_p.double().log().float()
    beside = [bound, bound.nextafter(torch.tensor(-torch.inf)), bound.nextafter(torch.tensor(torch.inf))]
    logits = torch.stack([torch.zeros_like(bound), *beside], 1)
    ones, zeros = torch.ones_like(min_p), torch.zeros_like(min_p).int()
    expected = reference._kept(logits, zeros, ones, min_p)
    assert torch.equal(_kept(filters.thresholds(logits, ones, zeros, ones, min_p), logits, ones), expected)
    assert expected[:, 1].any() and not expected[:, 1].all()


def test_a_row_draws_the_same_however_it_is_split(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    settings = [(1.0, 0, 1.0, 0.0), (0.8, 0, 0.9, 0.0), (0.0, 0, 1.0, 0.0), (3.0, 0, 1.0, 0.0)]
    arguments = (_logits(len(settings), 30_000, 2.0, device), *_columns(settings, device), *_keys(len(settings), device))
    at_once = sample.sample(*arguments)
    alone = torch.cat([sample.sample(*(argument[r : r + 1] for argument in arguments)) for r in range(len(settings))])
    monkeypatch.setattr(sample, "PROGRAMS", 1)
    assert sample.split_row(4, 30_000) == (30_720, 1)
    assert at_once.tolist() == alone.tolist() == sample.sample(*arguments).tolist() == reference.sample(*arguments).tolist()


def test_without_filters_the_search_is_left_out(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    settings = [(1.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0)]
    arguments = (_logits(2, 3000, 2.0, device), *_columns(settings, device), *_keys(2, device))
    expected = sample.sample(*arguments)
    monkeypatch.setattr(sample, "thresholds", None)
    assert torch.equal(sample.sample(*arguments, filtered=False), expected)


@pytest.mark.parametrize("settings", [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 9, 0.9, 0.1)])
def test_a_broken_row_gives_a_token_that_shows_it(settings: tuple[float, int, float, float], device: torch.device) -> None:
    nan, inf = float("nan"), float("inf")
    logits = _logits(5, 3000, 1.0, device)
    logits[0, [2500, 2600]] = nan
    logits[1, [2700, 40]] = inf
    logits[2] = -inf
    logits[3] = nan
    arguments = (logits, *_columns([settings] * 5, device), *_keys(5, device))
    chosen = sample.sample(*arguments)
    assert torch.equal(chosen, reference.sample(*arguments))
    assert chosen.tolist()[:4] == [2500, 40, 0, 0]
    assert logits.gather(1, chosen[:, None]).isfinite()[:, 0].tolist() == [False] * 4 + [True]


def test_equal_logits_give_the_first_and_no_rows_give_none(device: torch.device) -> None:
    logits = torch.zeros(2, 5000, device=device)
    logits[1, [4700, 33, 2100]] = 1.0
    columns, keys = _columns([(0.0, 0, 1.0, 0.0)] * 2, device), _keys(2, device)
    assert sample.sample(logits, *columns, *keys).tolist() == [0, 33]
    assert sample.sample(*(argument[:0] for argument in (logits, *columns, *keys))).tolist() == []


def test_rows_are_split_where_there_are_few() -> None:
    for rows, vocab in itertools.product((1, 7, 64, 2000), (1, 2048, 2049, 151_936, 262_144)):
        span, parts = sample.split_row(rows, vocab)
        assert (parts - 1) * span < vocab <= parts * span
        assert rows * parts <= max(2 * sample.PROGRAMS, rows)
    assert sample.split_row(1, 151_936) == (2048, 75)


def test_it_is_the_op_where_triton_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: torch.device
) -> None:
    monkeypatch.setenv(INTERPRETED, "1")
    caplog.set_level("INFO")
    assert select_sample_op(device) is sample.sample
    monkeypatch.delenv(INTERPRETED)
    assert select_sample_op(torch.device("cpu")) is not sample.sample
    assert "sampling: triton" in caplog.text and "not triton: Triton's kernels run on a cpu only in its interpreter" in caplog.text


def launch(rows: int, vocab: int) -> None:
    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    columns = (empty(rows), empty(rows, dtype=torch.int32), empty(rows), empty(rows))
    sample.sample(empty(rows, vocab), *columns, *(empty(rows, dtype=torch.int64) for _ in range(2)))


@pytest.mark.parametrize("vocab", [151_936, 262_144])
def test_compiles_to_16_byte_loads_without_spills(vocab: int) -> None:
    kernels = compiled(launch, 64, vocab)
    assert [kernel.name for kernel in kernels] == ["_survey", "_thresholds", "_draw", "_pick"]
    assert [kernel.stack for kernel in kernels] == [0] * 4
    assert all("ld.global.v4.b32" in kernel.ptx for kernel in kernels[:3])
