"""The choice of an attention backend, and its logged reason."""

import json
import re
from pathlib import Path

import pytest
import torch
from starling_engine import native
from starling_engine.attention import select
from starling_engine.attention.compressed import CompressedAttention
from starling_engine.attention.mla_torch import TorchMla
from starling_engine.attention.select import select_attention
from starling_engine.config import ParallelLayout
from starling_engine.errors import ConfigError
from starling_engine.parallel.absent import absent_ranks
from starling_engine.platforms import triton_support
from starling_engine.platforms.cpu import CpuPlatform
from starling_engine.platforms.triton_support import INTERPRETED
from starling_engine.worker.setup import RankSetup

from bench.gpu.shapes import model_folder
from tests.engine.workers import plain_worker

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


class CudaPlatform(CpuPlatform):
    """A platform with a device of CUDA, with the parts that the choice needs."""

    name = "cuda"

    def __init__(self) -> None:
        self.device = torch.device("cuda")

    def attention_backends(self) -> tuple[str, ...]:
        return ("triton", "flash_attn", "flashinfer", "sdpa", "torch")


def pretend_installed(monkeypatch: pytest.MonkeyPatch, packages: list[str]) -> None:
    """Lets the choice find these packages alone."""
    monkeypatch.setattr("importlib.util.find_spec", lambda package: object() if package in packages else None)
    monkeypatch.setattr(triton_support, "is_installed", lambda: "triton" in packages)


@pytest.fixture(autouse=True)
def _not_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INTERPRETED, raising=False)


@pytest.mark.parametrize(
    ("name", "dtype", "head_dim", "has_native", "chosen", "reason"),
    [
        ("auto", BF16, 128, True, "native", "the fastest here"),
        ("auto", FP32, 64, True, "native", "the fastest here"),
        ("auto", BF16, 128, False, "torch", "not native: the native kernels are not available"),
        ("auto", FP16, 128, True, "torch", "not native: its kernels have no torch.float16"),
        ("auto", BF16, 72, True, "torch", "not native: head_dim 72"),
        ("auto", BF16, 768, True, "torch", "not native: head_dim 768"),
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


def test_a_gpu_serves_an_indexer_without_kernels_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "why_not_triton", lambda _: None)
    backend, why = select_attention("auto", CudaPlatform(), BF16, 192, latent=True, indexed=True)
    assert isinstance(backend, TorchMla) and why.startswith("not triton: it has no kernels for an indexer")
    with pytest.raises(ConfigError, match=r"'triton' is not possible .*indexer.*possible: auto, sdpa, torch"):
        select_attention("triton", CudaPlatform(), BF16, 192, latent=True, indexed=True)
    assert select_attention("auto", CudaPlatform(), BF16, 192, latent=True)[0].name == "triton"


def test_a_gpu_serves_compressed_runs_without_kernels_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "why_not_triton", lambda _: None)
    backend, why = select_attention("auto", CudaPlatform(), BF16, 512, compressed=True, sinks=True)
    assert isinstance(backend, CompressedAttention) and why.startswith("not triton: it has no kernels for compressed runs")
    with pytest.raises(ConfigError, match=r"'triton' is not possible .*compressed runs.*possible: auto, sdpa, torch"):
        select_attention("triton", CudaPlatform(), BF16, 512, compressed=True, sinks=True)


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


def test_a_cache_in_fewer_bits_has_fewer_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", object)
    pretend_installed(monkeypatch, ["triton", "flash_attn", "flashinfer"])
    monkeypatch.setattr(select, "_make", lambda chosen, _latent: chosen)
    for name in ("flash_attn", "flashinfer"):
        with pytest.raises(ConfigError, match=r"not possible \(it has no attention sinks.*possible: auto, triton, sdpa, torch"):
            select_attention(name, CudaPlatform(), BF16, 128, sinks=True)
    for cache in ("fp8", "int8", "int4"):
        assert select_attention("auto", CpuPlatform(), BF16, 128, cache=cache)[0] == "native"
        assert select_attention("auto", CpuPlatform(), FP16, 128, cache=cache)[0] == "torch"
        assert select_attention("auto", CudaPlatform(), BF16, 128, cache=cache)[0] == "triton"
        for name in ("flash_attn", "flashinfer"):
            words = rf"not possible \(it reads no cache in {cache}\); possible: auto, triton, sdpa, torch"
            with pytest.raises(ConfigError, match=words):
                select_attention(name, CudaPlatform(), BF16, 128, cache=cache)


@pytest.mark.parametrize(
    ("installed", "name", "dtype", "head_dim", "outcome"),
    [
        (["triton"], "auto", BF16, 128, "triton: the fastest here"),
        (["triton", "flash_attn", "flashinfer"], "auto", FP16, 64, "triton: the fastest here"),
        (["flash_attn"], "auto", BF16, 128, "sdpa: not triton: triton is not installed"),
        (["triton"], "auto", BF16, 768, "sdpa: not triton: head_dim 768 is above 512"),
        (["triton"], "sdpa", BF16, 128, "sdpa: asked for"),
        (["triton"], "flash_attn", BF16, 128, "refused: the package flash_attn is not installed"),
        (["triton"], "flashinfer", BF16, 128, "refused: the package flashinfer is not installed"),
        (["triton", "flash_attn"], "flash_attn", FP32, 128, "refused: its kernels have no torch.float32"),
        (["triton", "flashinfer"], "flashinfer", BF16, 96, "refused: head_dim 96 is none of 64, 128, 256"),
        (["flash_attn"], "flash_attn", BF16, 128, "refused: triton is not installed, and it rotates and stores"),
    ],
)
def test_on_cuda(
    installed: list[str], name: str, dtype: torch.dtype, head_dim: int, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries are taken by name alone, and what is missing is said by name."""
    pretend_installed(monkeypatch, installed)
    monkeypatch.setattr(select, "_make", lambda chosen, _latent: chosen)
    try:
        chosen, why = select_attention(name, CudaPlatform(), dtype, head_dim)
    except ConfigError as error:
        found = f"refused: {error}"
        assert outcome.removeprefix("refused: ") in found and "possible: auto, " in found
    else:
        assert f"{chosen}: {why}" == outcome


def test_more_query_heads_than_a_query_block_holds_take_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, ["triton", "flash_attn", "flashinfer"])
    monkeypatch.setattr(select, "_make", lambda chosen, _latent: chosen)
    assert select_attention("auto", CudaPlatform(), BF16, 64, group=32)[0] == "triton"
    chosen, why = select_attention("auto", CudaPlatform(), BF16, 64, group=71)
    assert f"{chosen}: {why}" == "sdpa: not triton: 71 query heads share a key-value head, above 32"
    with pytest.raises(ConfigError, match=r"'triton' is not possible .71 query heads"):
        select_attention("triton", CudaPlatform(), BF16, 64, group=71)


@pytest.mark.parametrize(("tensor", "group"), [(1, 66), (2, 33)])
def test_a_rank_counts_the_heads_that_it_has(tensor: int, group: int, tmp_path: Path) -> None:
    """Each rank has one key-value head where there are fewer than ranks, for its share of the query heads."""
    settings = {"hidden_size": 66, "num_attention_heads": 66, "num_key_value_heads": 1, "head_dim": 16}
    folder = model_folder("Llama-3-8B", toy=True, root=tmp_path)
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | settings))
    layout = ParallelLayout(tensor=tensor)
    config = plain_worker(model_path=str(folder), load_format="dummy", attention_backend="triton", layout=layout)
    with pytest.raises(ConfigError, match=rf"'triton' is not possible .{group} query heads"):
        RankSetup.choose(config, CpuPlatform(), lambda _: absent_ranks(config))


def test_on_a_cpu_triton_is_for_tests() -> None:
    with pytest.raises(ConfigError, match=r"'triton' is not possible .*interpreter .TRITON_INTERPRET=1., for tests"):
        select_attention("triton", CpuPlatform(), BF16, 128)


def test_without_any_backend_the_reasons_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that compiles ahead has Triton's alone."""
    monkeypatch.setattr(CudaPlatform, "attention_backends", lambda _: ("triton",))
    with pytest.raises(ConfigError, match=r"no backend can serve this model \(triton: 40 query heads share"):
        select_attention("auto", CudaPlatform(), BF16, 128, group=40)
