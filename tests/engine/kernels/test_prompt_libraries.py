"""Prompts' attention by libraries, without a GPU: stand-ins do what the libraries document, by torch, on the very same tensors.

Their arguments are bound to the signatures of the libraries themselves, which are called on the meta device where they are there.
"""

import importlib.util
import inspect
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from starling_engine.attention import prompt_libraries, prompt_trial, prompts, select
from starling_engine.attention.base import AttentionWeights
from starling_engine.attention.prompt_libraries import CudnnAttention, FlashAttention3, installed_libraries
from starling_engine.attention.prompt_trial import PromptTrial, Tried, gathered_elements, tried_layers
from starling_engine.attention.prompts import PromptChunk, PromptLibrary, TakesLibraries, head_shape
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.native.cache_rows import FP8
from starling_engine.parallel.absent import absent_ranks
from starling_engine.platforms.interpreted import InterpretedPlatform
from starling_engine.platforms.triton_support import INTERPRETED
from starling_engine.worker import setup
from starling_engine.worker.sleep.memory import storages_of
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen

from tests.engine.attention.test_paged import PLAIN
from tests.engine.checkpoints import VARIANTS, make_reference
from tests.engine.cores import assert_greedy, core_for, greedy, run
from tests.engine.kernels.test_attention import Case, assert_close, expected, make
from tests.engine.workers import plain_worker

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stand-ins take the place of libraries that are for that GPU")

FP32 = torch.float32
CACHE = Path(os.environ.get("STARLING_CACHE") or Path.home() / ".cache/starling")
VARLEN = inspect.signature(varlen.varlen_attn)
"""The pinned torch has the function and its arguments. cuDNN is behind it from 2.15 on."""


def aligned_to_the_end(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [M, H, D], k and v [N, KVH, D] -> [M, H, D]: the last query sees all keys, as both libraries have it."""
    mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> Tensor:
    """Does what FlashAttention-3 documents: q [B, M, H, D], k and v [B, N, KVH, D], causality from the bottom right."""
    assert causal
    return torch.stack([aligned_to_the_end(*each, softmax_scale) for each in zip(q, k, v, strict=True)])


def varlen_attn(*args: Any, **options: Any) -> Tensor:
    """Does what torch 2.15 documents for cuDNN: pages [P, size, KVH, D] of a table, and seqused_k tokens of each sequence."""
    given = VARLEN.bind(*args, **options).arguments
    query, key, value, table = (given[name] for name in ("query", "key", "value", "block_table"))
    starts, used = given["cu_seq_q"].tolist(), given["seqused_k"].tolist()
    assert given["window_size"] == (-1, 0) and given["enable_gqa"] and given["cu_seq_k"] is None
    assert all(given[name].dtype == torch.int32 for name in ("cu_seq_q", "seqused_k", "block_table"))
    assert max(np.diff(starts)) <= given["max_q"] and max(used) <= given["max_k"] and starts[-1] == len(query)
    allowed = torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()
    assert allowed == (True, False), "where cuDNN cannot, no other kernel takes its place"
    parts = []
    for row, count in enumerate(used):
        at = torch.arange(count)
        places = table[row, at // key.shape[1]].long(), at % key.shape[1]
        with sdpa_kernel(SDPBackend.MATH):
            parts.append(aligned_to_the_end(query[starts[row] : starts[row + 1]], key[places], value[places], given["scale"]))
    return torch.cat(parts)


class Reference:
    """Computes a chunk by torch; waits for `seconds`, and is off by a `factor`."""

    name = "reference"
    gathers = True

    def __init__(self, seconds: float = 0.0, factor: float = 1.0, error: Exception | None = None) -> None:
        self._seconds, self._factor, self._error, self.calls = seconds, factor, error, 0

    def attend(self, q: Tensor, kv: Tensor, chunk: PromptChunk, scale: float) -> Tensor:
        """See `PromptLibrary`."""
        self.calls += 1
        time.sleep(self._seconds)
        if self._error is not None:
            raise self._error
        return self._factor * aligned_to_the_end(q, *prompt_libraries.gather(kv, chunk), scale)


@pytest.fixture(params=["fa3", "cudnn"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PromptLibrary:
    if request.param == "cudnn":
        monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
        return CudnnAttention()
    module: Any = ModuleType("stand_in")
    module.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "stand_in", module)
    return FlashAttention3("stand_in")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are long from 8 tokens on: the interpreter is slow."""
    monkeypatch.setattr(prompts, "LEAST_TOKENS", 8)
    monkeypatch.setattr(prompt_trial, "LEAST_TOKENS", 8)


def attend(case: Case, libraries: Mapping[str, PromptLibrary], **changes: Any) -> tuple[Tensor, Tensor, AttentionMetadata]:
    """Returns what Triton's backend gives with these libraries, what the reference gives, and the step."""
    from starling_engine.attention.triton_paged import TritonAttention

    inputs = make(case, torch.device("cpu"))
    heads = case.group * case.kv_heads
    layer = replace(
        PLAIN,
        num_heads=heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        scale=case.head_dim**-0.5,
        window=case.window,
        soft_cap=case.soft_cap,
        sinks=inputs.sinks,
    )
    backend = TritonAttention()
    backend.libraries = {head_shape(layer): each for each in libraries.values()}
    lens = inputs.query_start.tolist(), inputs.context_lens.tolist()
    longest = max(queries for _, queries in case.rows)
    positions = torch.zeros(len(inputs.q), dtype=torch.int64)
    meta = AttentionMetadata(
        *(positions, positions, inputs.query_start, inputs.context_lens, inputs.block_tables, longest),
        **{"host_lens": lens, "exact_lens": lens, **changes},
    )
    out = backend.attend(inputs.q, layer, inputs.kv, meta, or_triton=True)
    return out.view(inputs.q.shape), expected(case, inputs), meta


@pytest.mark.parametrize(
    "case",
    [
        Case(((37, 37),), dtype=FP32),
        Case(((70, 33), (9, 9), (66, 12)), group=4, head_dim=128, dtype=FP32),
        Case(((90, 41), (20, 20)), group=1, kv_heads=3, block_size=8, max_blocks=13),
    ],
)
def test_a_prompt_by_a_library_equals_the_reference(case: Case, library: PromptLibrary) -> None:
    """With tokens in the cache before it or without, several in a step; pages in slabs, in a random order, NaN around them."""
    found, wanted, meta = attend(case, {library.name: library})
    assert meta.by_library
    assert_close(found, wanted)


PROMPT = Case(((37, 37),), dtype=FP32)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        (Case(((66, 1), (90, 41)), dtype=FP32), {}),
        (replace(PROMPT, rows=((40, 7),)), {}),
        (replace(PROMPT, window=21), {}),
        (replace(PROMPT, soft_cap=3.0), {}),
        (replace(PROMPT, sinks=True), {}),
        (replace(PROMPT, cache=FP8), {}),
        (PROMPT, {"exact_lens": None}),
    ],
    ids=["beside a decode", "short", "window", "soft cap", "sinks", "fp8 cache", "recorded"],
)
def test_all_else_is_tritons(case: Case, changes: dict[str, Any]) -> None:
    library = Reference()
    found, wanted, meta = attend(case, {"reference": library}, **changes)
    assert not library.calls and not meta.by_library
    assert_close(found, wanted)


def test_a_library_that_fails_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """Triton computes the step in its place, and all later ones."""
    library = Reference(error=RuntimeError("no plan"))
    found, wanted, meta = attend(PROMPT, {"reference": library})
    assert library.calls == 1 and not meta.by_library and "no plan" in caplog.text
    assert_close(found, wanted)


def test_counters_of_launches_outlive_weights() -> None:
    """A model that sleeps without its weights does not give back what is the backend's, and finds it as it was."""
    from starling_engine.attention.triton_paged import TritonAttention

    backend = TritonAttention()
    assert isinstance(backend, TakesLibraries)
    assert backend._zeros(torch.device("cpu")).numel() and not storages_of([backend.forward])


@pytest.mark.parametrize("module", prompt_libraries.FLASH_ATTENTION_3)
def test_flash_attention_3_itself_takes_these_arguments(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheels can be imported without a GPU, and know shapes on the meta device. What they compute has not run."""
    folders = {"flash_attn_interface": "tokenspeed-fa3-3.0.0.post20260810", "fa3_fwd_interface": "fa3-fwd-0.0.3"}
    folder = CACHE / folders[module]
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there; `make fa3` installs it")
    monkeypatch.syspath_prepend(str(folder))
    assert isinstance(installed_libraries((8, 2, 128), torch.bfloat16, 16, 9)["fa3"], FlashAttention3)
    empty = [torch.empty(size, dtype=torch.int32, device="meta") for size in ((1, 64), 2, 1)]
    q, kv = (torch.empty(size, dtype=torch.bfloat16, device="meta") for size in ((600, 8, 128), (65, 2, 2, 16, 128)))
    found = FlashAttention3(module).attend(q, kv, PromptChunk(0, 600, 700, *empty), 0.1)
    assert found.shape == q.shape and found.dtype == q.dtype
    documented = " ".join((importlib.import_module(module).flash_attn_func.__doc__ or "").split())
    assert "If causal=True, the causal mask is aligned to the bottom right corner" in documented


def test_what_is_not_there_is_said_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    found = installed_libraries((8, 2, 128), torch.bfloat16, 16, 9)
    assert found["cudnn"] == f"torch {torch.__version__} has no attention to pages by cuDNN, which came with 2.15"
    assert found["fa3"] == "neither flash_attn_interface nor fa3_fwd_interface is installed"
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    assert installed_libraries((8, 2, 128), torch.bfloat16, 16, 8)["fa3"] == "its kernels are for compute capability 9"


@pytest.mark.parametrize(
    ("shape", "dtype", "block_size", "major", "words"),
    [
        ((8, 2, 128), torch.float16, 16, 9, "torch.float16 is not bfloat16"),
        ((8, 2, 256), torch.bfloat16, 16, 9, "head_dim 256 is no multiple of 8 up to 128"),
        ((8, 2, 128), torch.bfloat16, 48, 9, "blocks of 48 tokens are no power of two"),
        ((8, 2, 128), torch.bfloat16, 16, 8, "its kernels are for compute capabilities 9 and 10"),
    ],
)
def test_cudnn_is_for_some_heads(
    shape: tuple[int, int, int], dtype: torch.dtype, block_size: int, major: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.15.0+cu130")
    assert installed_libraries(shape, dtype, block_size, major)["cudnn"] == words
    assert isinstance(installed_libraries((8, 2, 128), torch.bfloat16, 16, 9)["cudnn"], CudnnAttention)


LAYER = replace(PLAIN, num_heads=2, num_kv_heads=1, head_dim=32)


def trial() -> tuple[PromptTrial, Any, Tried]:
    from starling_engine.attention.triton_paged import TritonAttention

    backend, kv = TritonAttention(), torch.zeros(4, 2, 1, 16, 32)
    return PromptTrial(backend, FP32, lambda: None, width=5, tokens=24, query_blocks=None), backend, Tried(LAYER, kv)


def test_the_fastest_library_that_gives_the_same_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    """The cache is as empty behind the trial as before."""
    own, backend, tried = trial()
    quick = Reference()
    offered: dict[str, PromptLibrary | str] = {
        "quick": quick,
        "slow": Reference(seconds=2.0),
        "wrong": Reference(factor=1.1),
        "broken": Reference(error=RuntimeError("no kernel image")),
        "absent": "it is not installed",
    }
    with caplog.at_level("INFO", "starling.attention"):
        own.choose(tried, lambda _shape, _block_size: offered)
    assert backend.libraries == {(2, 1, 32): quick}
    assert not tried.kv.any()
    (said,) = caplog.messages
    assert said.startswith("attention of prompts with 2 query and 1 key-value heads of 32: reference, ")
    assert "where triton takes" in said and "not wrong: 9 of 24 tokens are off by 1e-01 of the largest" in said
    assert "not slow: it takes" in said and "not broken: it failed: no kernel image; not absent: it is not installed" in said


def test_one_that_plans_for_every_length_is_not_taken(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    own, backend, tried = trial()
    met: set[int] = set()

    def attend(q: Tensor, kv: Tensor, chunk: PromptChunk, scale: float) -> Tensor:
        time.sleep(0.0 if len(q) in met else 0.3)
        met.add(len(q))
        return aligned_to_the_end(q, *prompt_libraries.gather(kv, chunk), scale)

    planning = Reference()
    monkeypatch.setattr(planning, "attend", attend)
    with caplog.at_level("INFO", "starling.attention"):
        own.choose(tried, lambda _shape, _block_size: {"planning": planning})
    assert not backend.libraries
    assert "triton; not planning: a length that it has not met takes" in caplog.text


def test_layers_are_tried_by_their_heads_and_what_is_gathered_is_counted() -> None:
    kv = torch.zeros(4, 2, 1, 16, 32)
    other: AttentionWeights = replace(LAYER, num_heads=4)
    layers = [(replace(LAYER, window=9), kv), (LAYER, kv), (LAYER, kv), (other, kv), (replace(other, soft_cap=1.0), kv)]
    assert [each.layer for each in tried_layers(layers, FP32)] == [LAYER, other]
    assert not tried_layers(layers, torch.bfloat16), "their cache has another dtype"
    offers: Mapping[str, PromptLibrary | str] = {"a": "no", "b": Reference()}
    assert gathered_elements([LAYER, other], 16, 1000, lambda *_: offers) == 2 * 32 * 1000
    assert gathered_elements([LAYER], 16, 1000, lambda *_: {"a": "no", "b": CudnnAttention()}) == 0


@pytest.mark.whole  # a whole engine in the interpreter
def test_an_engine_counts_the_steps_of_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's tokens are those of transformers, and its decodes are Triton's."""
    reference, library = make_reference(tmp_path, VARIANTS["llama3.1"]), Reference()
    monkeypatch.setenv(INTERPRETED, "1")
    monkeypatch.setattr(prompt_trial, "MOST_TOKENS", 16)
    monkeypatch.setattr(prompt_trial, "CALLS", 1)
    monkeypatch.setattr(setup, "offer_of", lambda _device, _dtype: lambda _shape, _block_size: {"reference": library})
    with core_for(tmp_path, device="interpreter", enforce_eager=True, kv_blocks=20) as core:
        tried = library.calls
        tokens, _ = run(core, [greedy("1", reference.prompt)])["1"]
        assert tried and library.calls > tried
        stats = core.scheduler.stats
        assert 0 < stats.library_steps_total < stats.steps_total
    assert_greedy(tokens, reference)


def test_who_asks_for_triton_by_name_has_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_reference(tmp_path, VARIANTS["llama3.1"])
    monkeypatch.setenv(INTERPRETED, "1")
    asked: list[str] = []

    def offer_of(device: torch.device, _dtype: torch.dtype) -> object:
        asked.append(device.type)
        return None

    monkeypatch.setattr(setup, "offer_of", offer_of)
    platform = InterpretedPlatform()
    platform.device = torch.device("meta")
    for name in ("auto", "triton"):
        monkeypatch.setattr(select, "why_not_triton", lambda _: None)
        config = plain_worker(model_path=str(tmp_path), attention_backend=name)
        own = setup.RankSetup.choose(config, platform, lambda _: absent_ranks(config))  # noqa: B023 - called at once
        assert own.attention.name == "triton" and own._offer is None
    assert asked == ["meta", "cpu"], "on a CPU nothing is offered"
    assert prompt_trial.offer_of(torch.device("cpu"), FP32)((8, 2, 128), 16) == {}
