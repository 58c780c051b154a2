"""The choice of an attention backend, and what it says of it."""

import re

import pytest
import torch
from starling_engine import native
from starling_engine.attention.mla import TorchMla
from starling_engine.attention.selector import select_attention
from starling_engine.errors import ConfigError
from starling_engine.platforms.cpu import CpuPlatform

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("name", "dtype", "head_dim", "has_native", "chosen", "reason"),
    [
        ("auto", BF16, 128, True, "native", "the fastest here"),
        ("auto", FP32, 64, True, "native", "the fastest here"),
        ("auto", BF16, 128, False, "torch", "not native: the native kernels are not available"),
        ("auto", FP16, 128, True, "torch", "not native: its kernels have no torch.float16"),
        ("auto", BF16, 72, True, "torch", "not native: head_dim 72"),
        ("auto", BF16, 512, True, "torch", "not native: head_dim 512"),
        ("torch", BF16, 128, True, "torch", "asked for"),
        ("native", BF16, 128, True, "native", "asked for"),
    ],
)
def test_takes_the_first_that_can_and_says_why(
    name: str,
    dtype: torch.dtype,
    head_dim: int,
    has_native: bool,
    chosen: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(native, "load", lambda: object() if has_native else None)
    with caplog.at_level("INFO", "starling.attention"):
        backend, why = select_attention(name, CpuPlatform(), dtype, head_dim)
    assert backend.name == chosen
    assert why.startswith(reason)
    assert caplog.messages == [f"attention: {chosen} ({why})"]


@pytest.mark.parametrize(("name", "reason"), [("auto", "not native: .*grouped-query"), ("torch", "asked for")])
def test_latents_have_a_backend_of_their_own(name: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", object)
    backend, why = select_attention(name, CpuPlatform(), BF16, 128, latent=True)
    assert isinstance(backend, TorchMla)
    assert re.match(reason, why)
    with pytest.raises(ConfigError, match=r"'native' is not possible .*grouped-query.*possible: auto, torch"):
        select_attention("native", CpuPlatform(), BF16, 128, latent=True)


@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [
        ("native", FP16, "'native' is not possible .*float16.*possible: auto, torch"),
        ("flash", BF16, "'flash' is not possible .cpu has no such backend.; possible: auto, native, torch"),
    ],
)
def test_an_impossible_choice_says_what_is_possible(
    name: str, dtype: torch.dtype, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "load", object)
    with pytest.raises(ConfigError, match=words) as caught:
        select_attention(name, CpuPlatform(), dtype, 128)
    assert caught.value.field == "attention_backend"
