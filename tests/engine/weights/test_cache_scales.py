"""Scales of a cache in fp8: found under every name that tools write; a number that is no scale is refused."""

from pathlib import Path

import pytest
import torch
from starling_engine.errors import WeightError
from starling_engine.weights.cache_scales import load_kv_scales

from tests.engine.checkpoints import VARIANTS, edit_json, write_checkpoint
from tests.engine.rounding_caches import ONES, SCALES, add_scales, scale_tensors
from tests.engine.weights.test_loader import empty_model, loaded

LAYER = "model.layers.1.self_attn"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, VARIANTS["qwen2"])
    return tmp_path


def scales_of(folder: Path) -> list[tuple[float, float]]:
    model = empty_model(folder)
    load_kv_scales(model.kv_scaled, folder)
    return [(layer.key_scale, layer.value_scale) for layer in model.kv_scaled.values()]


def test_each_name_and_form_is_found(folder: Path) -> None:
    assert scales_of(folder) == ONES
    add_scales(folder, scale_tensors(SCALES))
    assert scales_of(folder) == [pytest.approx(both) for both in SCALES]


def test_a_layer_without_one_has_1(folder: Path) -> None:
    add_scales(folder, {f"{LAYER}.v_scale": torch.tensor([0.5], dtype=torch.bfloat16)})
    assert scales_of(folder) == [(1, 1), (1, 0.5), (1, 1)]


def test_names_of_older_tools_are_read(folder: Path) -> None:
    of_projections = (("k", 0.5), ("v", 2.0))
    early = {f"model.layers.0.self_attn.{kind}_proj.output_scale": torch.tensor([scale]) for kind, scale in of_projections}
    add_scales(folder, {**early, f"{LAYER}.kv_scale": torch.tensor(0.25)})
    assert scales_of(folder) == [(0.5, 2), (0.25, 0.25), (1, 1)]
    loaded(folder)


def test_they_change_nothing_where_the_cache_is_of_the_model_s_dtype(folder: Path) -> None:
    """Also where the config says that keys and values, and nothing else, are meant to be quantized."""
    before = loaded(folder)
    add_scales(folder, scale_tensors(SCALES))
    scheme = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}
    edit_json(
        folder / "config.json",
        {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}},
    )
    assert torch.equal(loaded(folder), before)


@pytest.mark.parametrize(
    ("config", "taken"),
    [
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, True),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, False),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}, True),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"dynamic": False, "num_bits": 4, "type": "float"}}, False),
    ],
)
def test_scales_of_another_type_are_not_taken(
    config: dict[str, object], taken: bool, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit_json(folder / "config.json", {"quantization_config": config})
    add_scales(folder, scale_tensors(SCALES))
    assert scales_of(folder) == (ONES if not taken else [pytest.approx(both) for both in SCALES])
    assert ("of another type" in caplog.text) == (not taken)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.ones(2), r"k_scale \[2\] has the wrong shape \(expected one number"),
        (torch.zeros(1), "k_scale is 0.0; a scale is a positive number"),
        (torch.tensor(-0.5), "k_scale is -0.5"),
        (torch.tensor(float("nan")), "k_scale is nan"),
        (torch.tensor(float("inf")), "k_scale is inf"),
    ],
)
def test_what_is_no_scale_is_named(folder: Path, tensor: torch.Tensor, words: str) -> None:
    add_scales(folder, {f"{LAYER}.k_scale": tensor})
    with pytest.raises(WeightError, match=rf"{LAYER}\.{words}"):
        scales_of(folder)
