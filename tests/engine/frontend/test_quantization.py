"""Weights that are quantized while they are loaded: what the model then says, in each layout, and what its tiers find."""

import inspect
import os.path
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from starling_engine import LLM, SamplingParams, native
from starling_engine.errors import ConfigError
from starling_engine.kv_offload.secondary.folder.inspect import list_models

from tests.engine.checkpoints import VARIANTS, Variant, write_checkpoint
from tests.engine.real_engine import MODEL, engine_args
from tests.engine.written import copy_tokenizer

pytestmark = [
    pytest.mark.skipif(native.load() is None, reason="this machine has no native kernels"),
    pytest.mark.timeout(120),
]

TEXT = "\n\n".join(inspect.getdoc(each) or "" for each in (os.path.join, textwrap.wrap, str.partition, dict.setdefault, list.sort))
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
READ = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)


@contextmanager
def model(path: Path | str = MODEL, **args: Any) -> Iterator[LLM]:
    settings = {"dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 4, "kv_cache_memory_bytes": 16 << 20, **args}
    with LLM(str(path), **settings) as llm:
        yield llm


def surprise(llm: LLM) -> float:
    """Returns the mean of -log p of the text's tokens, in nats."""
    (output,) = llm.generate([TEXT], READ)
    assert output.prompt_logprobs is not None and output.prompt_token_ids is not None
    found = [row[token].logprob for row, token in zip(output.prompt_logprobs, output.prompt_token_ids, strict=True) if row]
    return -sum(found) / len(found)


@pytest.fixture(scope="module")
def plain() -> float:
    with model() as llm:
        return surprise(llm)


@pytest.mark.parametrize(("kind", "bound"), [("int8", 0.01), ("int4", 0.08)])
def test_a_cache_in_fewer_bits_costs_little(kind: str, bound: float, plain: float) -> None:
    with model(kv_cache_dtype=kind) as llm:
        assert abs(surprise(llm) - plain) < bound


@pytest.mark.parametrize(("name", "bound"), [("int8", 0.01), ("int4", 0.15), ("fp8", 0.02)])
def test_the_model_stays_as_good_as_its_bits_allow(name: str, bound: float, plain: float) -> None:
    with model(quantization=name) as llm:
        found = surprise(llm)
        answers = [output.outputs[0].token_ids for output in llm.generate(["The os module", TEXT[:200]], GREEDY)]
        alone = [llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in ("The os module", TEXT[:200])]
    assert 1e-5 < abs(found - plain) < bound
    assert answers == alone


def test_prompts_of_several_steps_and_weights_after_a_sleep_are_the_same() -> None:
    with model(quantization="int8", max_num_batched_tokens=64) as llm:
        before = llm.generate([TEXT], GREEDY)[0].outputs[0].token_ids
        llm.sleep(level=2)
        llm.wake_up()
        assert llm.generate([TEXT], GREEDY)[0].outputs[0].token_ids == before


@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_ranks_have_the_same_weights(layout: dict[str, int]) -> None:
    with model(quantization="int4") as one, model(quantization="int4", **layout) as several:
        assert surprise(several) == pytest.approx(surprise(one), abs=5e-3)


@pytest.mark.parametrize(
    "layout", [{"tensor_parallel_size": 2}, {"data_parallel_size": 2, "enable_expert_parallel": True}], ids=str
)
def test_ranks_have_the_same_experts(layout: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 64, "vocab_size": 4096}
    write_checkpoint(tmp_path, Variant("qwen3_moe", {**VARIANTS["qwen3-moe"].changes, **sizes}), torch.bfloat16)
    copy_tokenizer(tmp_path)
    with (
        model(tmp_path) as plain,
        model(tmp_path, quantization="int4") as one,
        model(tmp_path, quantization="int4", **layout) as several,
    ):
        assert surprise(several) == pytest.approx(surprise(one), abs=1e-2)
        assert surprise(one) != pytest.approx(surprise(plain), abs=1e-3)


def test_keys_of_other_weights_are_not_found(tmp_path: Path) -> None:
    tiers = {"kv_fs_path": str(tmp_path), "kv_fs_bytes": 64 << 20, "kv_cpu_bytes": 16 << 20}
    for args in ({}, {"quantization": "int8"}, {"quantization": "int4"}):
        with model(**tiers, **args) as llm:
            assert llm.generate([TEXT], GREEDY)[0].num_cached_tokens == 0
    names = {"bfloat16", *(f"bfloat16 by weights in {name} (version 2)" for name in ("int8", "int4"))}
    assert {found.dtype for found in list_models(tmp_path) if found.objects} == names


def test_what_is_no_scheme_and_what_has_no_kernel_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match="quantization: must be one of int8, int4, fp8, got 'awq'; leave it out for a checkpoint that is quantized",
    ):
        engine_args(quantization="awq")
    with pytest.raises(ConfigError, match=r"quantization: int4 is not possible: .*; this is torch\.float32$"):
        LLM(MODEL, dtype="float32", quantization="int4", kv_cache_memory_bytes=16 << 20)
