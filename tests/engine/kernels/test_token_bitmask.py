"""Masks against their definition, how they compile, and what becomes of masked rows where all kernels are Triton's."""

from pathlib import Path

import pytest
import torch
from starling_engine.kernels import token_bitmask
from starling_engine.native import reference
from starling_engine.platforms.triton_support import INTERPRETED
from starling_engine.sampling.select import select_mask_op
from torch import Tensor

from tests.engine.bitmasks import VOCABS, check_masks
from tests.engine.checkpoints import VARIANTS, make_reference
from tests.engine.masked_worker import MaskedWorker, check_impossible_rows, check_logprobs

from .compiled import compiled


@pytest.mark.parametrize("vocab", VOCABS)
def test_forbids_what_the_mask_does_not_allow(vocab: int, device: torch.device) -> None:
    check_masks(token_bitmask.apply_token_bitmask, vocab, device)


def test_no_rows_change_nothing(device: torch.device) -> None:
    logits = torch.zeros(2, 40, device=device)
    nothing = torch.zeros(0, 2, dtype=torch.int32, device=device)
    token_bitmask.apply_token_bitmask(logits, nothing[:, 0].long(), nothing)
    assert not logits.any()


def test_it_is_the_op_where_triton_runs(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setenv(INTERPRETED, "1")
    assert select_mask_op(device) is token_bitmask.apply_token_bitmask
    monkeypatch.delenv(INTERPRETED)
    assert select_mask_op(torch.device("cpu")) is not token_bitmask.apply_token_bitmask
    assert select_mask_op(torch.device("meta")) is reference.apply_token_bitmask


@pytest.mark.whole  # a minute and a half
@pytest.mark.skipif(torch.cuda.is_available(), reason="the platform puts its tensors on the CPU, and the kernels are compiled here")
def test_a_device_samples_masked_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERPRETED, "1")
    reference = make_reference(tmp_path, VARIANTS["llama3.1"])
    worker = MaskedWorker(tmp_path, device="interpreter")
    check_impossible_rows(worker, reference)
    check_logprobs(worker, reference)


def launch(rows: int, vocab: int) -> None:
    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    words = empty(rows, -(-vocab // 32), dtype=torch.int32)
    token_bitmask.apply_token_bitmask(empty(256, vocab, dtype=torch.float32), empty(rows, dtype=torch.int64), words)


@pytest.mark.parametrize("vocab", [151_936, 128_256])
def test_compiles_to_16_byte_loads_and_stores_without_spills(vocab: int) -> None:
    (kernel,) = compiled(launch, 64, vocab)
    assert kernel.stack == 0
    assert "ld.global.v4.b32" in kernel.ptx and "st.global.v4.b32" in kernel.ptx
