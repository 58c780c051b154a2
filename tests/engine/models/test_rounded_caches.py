"""A cache in fewer bits: the same logits as transformers with one that rounds so, under each backend of a CPU."""

from pathlib import Path

import pytest
import torch
from starling_engine.attention.base import AttentionBackend
from starling_engine.errors import ConfigError
from starling_engine.frontend.resolve import resolve
from starling_engine.models.decoder import Decoder
from starling_engine.native.cache_rows import FP8, INT4, INT8
from starling_engine.sleep import Sleep, WakeUp
from starling_engine.weights.cache_scales import load_kv_scales

from tests.engine.checkpoints import FAMILIES, PROMPT, VARIANTS, Reference, write_checkpoint
from tests.engine.core.test_sleep import ALL, SleepDriver
from tests.engine.cores import core_for, greedy, run
from tests.engine.models.test_decoder import build
from tests.engine.paged_driver import PagedDriver
from tests.engine.real_engine import engine_args
from tests.engine.rounding_caches import FAR, ONES, SCALES, assert_near, cache_reference

CASES = {
    "qwen3": ("qwen3", ONES, FP8),
    "window": ("mistral-window", ONES, FP8),
    "scales": ("llama3.1", SCALES, FP8),
    "int8": ("qwen3", ONES, INT8),
    "int4": ("qwen3", ONES, INT4),
}


def scaled(reference: Reference, backend: AttentionBackend, dtype: torch.dtype = torch.float32) -> Decoder:
    model = build(reference, backend, dtype)
    load_kv_scales(model.kv_scaled, reference.folder)
    return model


def assert_alike(tokens: list[int], reference: Reference, near: float = 0.05) -> None:
    """Greedy tokens: equal, or first different where the reference's two best are near to each other."""
    for step, (ours, theirs) in enumerate(zip(tokens, reference.tokens, strict=True)):
        if ours != theirs:
            best, second = reference.logits[PROMPT + step - 1].topk(2).values.tolist()
            assert best - second <= near, f"step {step}: {ours} instead of {theirs}"
            return


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_a_cache_that_rounds(name: str, backend: AttentionBackend, tmp_path: Path) -> None:
    """The prompt in two pieces, the answer token by token."""
    variant, scales, cache = CASES[name]
    reference, plain = cache_reference(tmp_path, variant, scales, cache)
    driver = PagedDriver(scaled(reference, backend), cache, block_size=8)
    pieces = [reference.prompt[:23], reference.prompt[23:], *([token] for token in reference.tokens)]
    found = torch.cat([driver.run([(0, piece)])[0] for piece in pieces])
    assert_near(found, reference.logits, plain, far=FAR / 10 if cache == INT8 else FAR)


def test_bfloat16_is_rounded_as_well(backend: AttentionBackend, tmp_path: Path) -> None:
    """Compares with wrong scales: the cache is less exact by itself, and scales matter much more."""
    reference, plain = cache_reference(tmp_path, "llama3.1", SCALES)
    model = scaled(reference, backend, torch.bfloat16)
    (found,) = PagedDriver(model, FP8, block_size=16).run([(0, reference.prompt)])
    assert (found - reference.logits[:PROMPT]).abs().mean() < 0.2
    assert (found - plain[:PROMPT]).abs().mean() > 0.5


@pytest.mark.parametrize(
    ("argument", "kind"),
    [("auto", "float32"), ("fp8", "float8_e4m3fn"), ("fp8_e4m3", "float8_e4m3fn"), ("int8", "int8"), ("int4", "uint8")],
)
def test_the_argument_decides_what_is_cached(argument: str, kind: str) -> None:
    config = resolve(engine_args(kv_cache_dtype=argument))[2]
    assert (config.worker.kv_dtype, config.cache_dtype) == (kind, argument)


def test_a_model_that_cannot_be_cached_so_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype: must be one of auto, fp8, fp8_e4m3, int8, int4, got 'fp8_e5m2'"):
        engine_args(kv_cache_dtype="fp8_e5m2")
    write_checkpoint(tmp_path, VARIANTS["deepseek-v3"])
    with pytest.raises(ConfigError, match=r"kv_cache_dtype: fp8 is not possible: this model caches latents .MLA.; possible: auto"):
        resolve(engine_args(model=str(tmp_path), kv_cache_dtype="fp8"))
    write_checkpoint(tmp_path / "v4", FAMILIES["deepseek-v4"])
    with pytest.raises(ConfigError, match="int8 is not possible: this model caches compressed runs of tokens; possible: auto"):
        resolve(engine_args(model=str(tmp_path / "v4"), kv_cache_dtype="int8"))
    write_checkpoint(tmp_path / "llama", VARIANTS["llama3.1"])
    with pytest.raises(ConfigError, match="int4 is not possible: 32 columns share a scale, and head_dim is 16; possible: auto"):
        resolve(engine_args(model=str(tmp_path / "llama"), kv_cache_dtype="int4"))


def test_the_same_bytes_hold_as_many_more_tokens_and_greedy_answers_are_the_reference_s(tmp_path: Path) -> None:
    """Runs a core and its worker with the scales of the checkpoint, also after the weights were read again."""
    reference, _ = cache_reference(tmp_path, "llama3.1", SCALES)
    with core_for(tmp_path) as core:
        blocks = core.scheduler.kv.pool.num_blocks
    with core_for(tmp_path, kv_cache="fp8") as core:
        assert core.scheduler.kv.pool.num_blocks == 4 * blocks, "of float32"
        answers = run(core, [greedy(str(n), reference.prompt) for n in range(2)])
        for tokens, error in answers.values():
            assert error is None
            assert_alike(tokens, reference)
        driver = SleepDriver(core)
        driver.command(Sleep(2, "refuse"))
        assert driver.answer().error is None
        driver.command(WakeUp(ALL))
        assert driver.answer().error is None
        assert run(core, [greedy("0", reference.prompt)])["0"] == answers["0"]


def test_layers_that_read_another_one_s_cache_have_its_scales(backend: AttentionBackend, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, FAMILIES["gemma4-inputs"])
    model = build(Reference(tmp_path, [], [], torch.empty(0)), backend)
    assert [*model.kv_scaled] == [f"model.layers.{layer}.self_attn" for layer in range(3)]
    for number, weights in enumerate(model.kv_scaled.values(), start=1):
        weights.key_scale, weights.value_scale = 0.5 * number, 2.0 * number
    model.share_kv_scales()
    readers = [layer.attention.weights for layer in model._layers[3:]]
    assert [(each.key_scale, each.value_scale) for each in readers] == [(1.5, 6.0), (1.0, 4.0)]
