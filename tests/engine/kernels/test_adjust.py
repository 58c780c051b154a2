"""Adjusted logits against their torch reference, and how that compiles."""

import pytest
import torch
from starling_engine.kernels import adjust
from starling_engine.kernels import token_words as layout
from starling_engine.platforms.triton_support import INTERPRETED
from starling_engine.sampling.select import select_adjust_op
from torch import Tensor

from .compiled import compiled


def _arguments(vocab: int, device: torch.device) -> list[Tensor]:
    """Four rows of six logits, in slots of their own, with every bit and counts up to 5."""
    torch.manual_seed(vocab)
    logits = 4 * torch.randn(6, vocab)
    logits[4, 0], logits[2, -1] = float("nan"), float("-inf")
    words = torch.randint(0, 6 << layout.COUNT_SHIFT, (9, vocab), dtype=torch.int32)
    words[torch.rand(9, vocab) < 0.5] &= layout.PROMPT | layout.STOP
    penalties = torch.tensor([[1.3, 0.7, 0.0], [0.5, -0.3, 1.1], [1.0, 0.0, 0.0], [7.0, 2.0, -2.0]])
    rows, slots, below_min_tokens = torch.tensor([4, 0, 5, 2]), torch.tensor([8, 3, 0, 1]), torch.tensor([True, False, True, False])
    return [tensor.to(device) for tensor in (logits, rows, words, slots, penalties, below_min_tokens)]


@pytest.mark.parametrize("vocab", [1, 997, 4800])
def test_gives_the_reference_to_the_bit(vocab: int, device: torch.device) -> None:
    arguments = _arguments(vocab, device)
    before = arguments[0].clone()
    actual, expected = adjust.adjust(*arguments), layout.adjust(*arguments)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(arguments[0], before, rtol=0, atol=0, equal_nan=True)


def test_no_rows_give_none(device: torch.device) -> None:
    logits, rows, words, slots, penalties, below_min_tokens = _arguments(10, device)
    assert adjust.adjust(logits, rows[:0], words, slots[:0], penalties[:0], below_min_tokens[:0]).shape == (0, 10)


def test_it_is_the_op_where_triton_runs(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setenv(INTERPRETED, "1")
    assert select_adjust_op(device) is adjust.adjust
    monkeypatch.delenv(INTERPRETED)
    assert select_adjust_op(torch.device("cpu")) is layout.adjust


def launch(rows: int, vocab: int) -> None:
    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    fp32 = torch.float32
    adjust.adjust(
        *(empty(256, vocab, dtype=fp32), empty(rows), empty(257, vocab, dtype=torch.int32), empty(rows)),
        *(empty(rows, 3, dtype=fp32), empty(rows, dtype=torch.bool)),
    )


@pytest.mark.parametrize("vocab", [151_936, 128_256])
def test_compiles_to_16_byte_loads_without_spills(vocab: int) -> None:
    (kernel,) = compiled(launch, 64, vocab)
    assert kernel.stack == 0
    assert "ld.global.v4.b32" in kernel.ptx and "st.global.v4.b32" in kernel.ptx
    assert "fma.rn" not in kernel.ptx, "sums are rounded as the reference rounds them"
