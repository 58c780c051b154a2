"""Sampling against its torch reference, and how it compiles."""

import itertools

import pytest
import torch
from starling_engine.kernels import filters, sample
from starling_engine.native import reference
from starling_engine.native.sampling_metadata import GREEDY, SAMPLING_COLUMNS, sampling_metadata
from starling_engine.params import SamplingParams
from starling_engine.platforms.triton_support import INTERPRETED
from starling_engine.sampling.select import select_sample_op
from torch import Tensor

from .compiled import compiled


def params(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> SamplingParams:
    return SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


SETTINGS = [
    *itertools.starmap(params, itertools.product((1.0,), (0, 1, 20, 700), (0.0, 0.3, 0.95, 1.0))),
    *itertools.starmap(params, itertools.product((0.3, 5.0), (0, 20), (0.9, 1.0), (0.1,))),
    params(0.0, 5, 0.5, 0.5),
    params(0.7, 5000),
    params(min_p=1.0),
]


def _keys(rows: int, device: torch.device) -> list[Tensor]:
    seed = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=torch.Generator().manual_seed(3))
    return [seed.to(device), torch.arange(rows, device=device)]


def _logits(rows: int, vocab: int, spread: float, device: torch.device) -> Tensor:
    logits = spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[:, ::3] = logits[:, ::3].round()  # ties, zeros of both signs too
    return logits.to(device)


def _kept(lowest: Tensor, logits: Tensor, temperature: Tensor) -> Tensor:
    return logits / torch.where(temperature == 0, 1.0, temperature)[:, None] >= lowest[:, None]


@pytest.mark.parametrize(
    ("vocab", "spread", "every"),
    [(997, 2.0, 3), pytest.param(997, 2.0, 1, marks=pytest.mark.whole), (1000, 0.0, 6), (4800, 1.0, 6)],
)
def test_draws_the_reference_tokens(vocab: int, spread: float, every: int, device: torch.device) -> None:
    settings = SETTINGS[::every]
    logits = _logits(len(settings), vocab, spread, device)
    logits[1, : vocab // 2] = float("-inf")
    arguments = (logits, sampling_metadata(settings, device), *_keys(len(settings), device))
    assert torch.equal(sample.sample(*arguments), reference.sample(*arguments))


@pytest.mark.parametrize("spread", [0.02, 6.0])
def test_filters_keep_what_the_reference_keeps(spread: float, device: torch.device) -> None:
    """Checks a flat distribution, whose every group is searched, and one whose few likeliest tokens have nearly all."""
    settings = [params(1.0, 50, 0.9), params(0.6, 20, 0.95), params(top_p=0.8), params(min_p=0.05), params(), params(0.0, 3, 0.2)]
    logits = _logits(len(settings), 20_000, spread, device)
    metadata = sampling_metadata(settings, device)
    lowest = filters.thresholds(logits, metadata)
    temperature = metadata.temperature
    expected = reference._kept(logits / torch.where(temperature == 0, 1.0, temperature)[:, None], metadata)
    assert torch.equal(_kept(lowest, logits, temperature)[:5], expected[:5])
    assert lowest[4:].tolist() == [float("-inf")] * 2, "rows that ask for no filter are not searched"


def test_min_p_keeps_no_neighbour_below(device: torch.device) -> None:
    """The reference's bound is a double: of the floats beside it, only the one above is kept."""
    metadata = sampling_metadata([params(min_p=min_p) for min_p in torch.linspace(0.05, 0.95, 8).tolist()], device)
    bound = metadata.min_p.double().log().float()
    beside = [bound, bound.nextafter(torch.tensor(-torch.inf)), bound.nextafter(torch.tensor(torch.inf))]
    logits = torch.stack([torch.zeros_like(bound), *beside], 1)
    expected = reference._kept(logits, metadata)
    assert torch.equal(_kept(filters.thresholds(logits, metadata), logits, metadata.temperature), expected)
    assert expected[:, 1].any() and not expected[:, 1].all()


def test_a_row_draws_the_same_however_it_is_split(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    settings = [params(), params(0.8, top_p=0.9), GREEDY, params(3.0)]
    logits, keys = _logits(len(settings), 12_000, 2.0, device), _keys(len(settings), device)
    arguments = (logits, sampling_metadata(settings, device), *keys)
    at_once = sample.sample(*arguments)
    each = (slice(r, r + 1) for r in range(len(settings)))
    alone = torch.cat([sample.sample(logits[r], sampling_metadata(settings[r], device), *(key[r] for key in keys)) for r in each])
    monkeypatch.setattr(sample, "PROGRAMS", 1)
    assert sample.split_row(4, 12_000) == (12_288, 1)
    assert at_once.tolist() == alone.tolist() == sample.sample(*arguments).tolist() == reference.sample(*arguments).tolist()


def test_without_filters_the_search_is_left_out(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    arguments = (_logits(2, 3000, 2.0, device), sampling_metadata([params(), GREEDY], device), *_keys(2, device))
    expected = sample.sample(*arguments)
    monkeypatch.setattr(sample, "thresholds", None)
    assert torch.equal(sample.sample(*arguments, filtered=False), expected)


@pytest.mark.parametrize("setting", [GREEDY, params(), params(1.0, 9, 0.9, 0.1)])
def test_a_broken_row_gives_a_token_that_shows_it(setting: SamplingParams, device: torch.device) -> None:
    nan, inf = float("nan"), float("inf")
    logits = _logits(5, 3000, 1.0, device)
    logits[0, [2500, 2600]] = nan
    logits[1, [2700, 40]] = inf
    logits[2] = -inf
    logits[3] = nan
    arguments = (logits, sampling_metadata([setting] * 5, device), *_keys(5, device))
    chosen = sample.sample(*arguments)
    assert torch.equal(chosen, reference.sample(*arguments))
    assert chosen.tolist()[:4] == [2500, 40, 0, 0]
    assert logits.gather(1, chosen[:, None]).isfinite()[:, 0].tolist() == [False] * 4 + [True]


def test_equal_logits_give_the_first_and_no_rows_give_none(device: torch.device) -> None:
    logits = torch.zeros(2, 5000, device=device)
    logits[1, [4700, 33, 2100]] = 1.0
    assert sample.sample(logits, sampling_metadata([GREEDY] * 2, device), *_keys(2, device)).tolist() == [0, 33]
    assert sample.sample(logits[:0], sampling_metadata([], device), *_keys(0, device)).tolist() == []


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

    metadata = SAMPLING_COLUMNS.map(lambda column: empty(rows, dtype=column.dtype))
    sample.sample(empty(rows, vocab), metadata, *(empty(rows, dtype=torch.int64) for _ in range(2)))


@pytest.mark.parametrize("vocab", [151_936, 262_144])
def test_compiles_to_16_byte_loads_without_spills(vocab: int) -> None:
    kernels = compiled(launch, 64, vocab)
    assert [kernel.name for kernel in kernels] == ["_survey", "_thresholds", "_draw", "_pick"]
    assert [kernel.stack for kernel in kernels] == [0] * 4
    assert all("ld.global.v4.b32" in kernel.ptx for kernel in kernels[:3])
