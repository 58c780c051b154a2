"""The repository's own model as other people's tools quantize it: as good as its bits allow, in each layout, apart in the tiers."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from starling_engine import native
from starling_engine.errors import ConfigError, UnsupportedModel
from starling_engine.frontend.resolve import resolve
from starling_engine.kv_offload.secondary.fingerprint import fingerprint_of
from starling_engine.weights.checkpoint import stored_formats

from tests.engine.checkpoints import edit_json
from tests.engine.frontend.test_quantization import GREEDY, TEXT, model, surprise
from tests.engine.quantized_checkpoints import Writer, auto_round, bitsandbytes, compressed, write_quantized
from tests.engine.real_engine import MODEL, engine_args
from tests.engine.written import Written, copy_tokenizer

pytestmark = [
    pytest.mark.skipif(native.load() is None, reason="this machine has no native kernels"),
    pytest.mark.timeout(120),
]

NATS: dict[str, tuple[Callable[[], Writer], float]] = {
    "W8A8": (partial(compressed, "W8A8"), 0.01),
    "FP8_DYNAMIC": (partial(compressed, "FP8_DYNAMIC"), 0.02),
    "gptq in 8 bits": (partial(auto_round, "auto_gptq", 8, symmetric=True), 0.01),
    "gptq": (partial(auto_round, "auto_gptq", 4, symmetric=True), 0.1),
    "awq": (partial(auto_round, "auto_awq", 4, symmetric=False), 0.1),
    "nf4": (partial(bitsandbytes, load_in_4bit=True, bnb_4bit_quant_type="nf4"), 0.15),
    "NVFP4": (partial(compressed, "NVFP4"), 0.2),
    "W4A16": (partial(compressed, "W4A16"), 0.25),
}
"""Writers of the model, and bounds on the nats a token by which it surprises more, or less, than bfloat16.

Nothing is calibrated: 4 bits in groups of 128 lose more than those in groups of 32."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pydoc")

    def write(kind: str) -> Path:
        (folder / kind).mkdir()
        write_quantized(NATS[kind][0], Path(MODEL), folder / kind)
        copy_tokenizer(folder / kind)
        return folder / kind

    return Written(write)


@pytest.fixture(scope="module")
def plain() -> float:
    with model(MODEL) as llm:
        return surprise(llm)


ALIKE = ("gptq in 8 bits", "W4A16")
"""Kinds whose codes another kind has, too."""


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.whole] if kind in ALIKE else []) for kind in NATS])
def test_the_model_stays_as_good_as_its_bits_allow(kind: str, folders: dict[str, Path], plain: float) -> None:
    with model(folders[kind], dtype="auto") as llm:
        found = surprise(llm)
        answers = [output.outputs[0].token_ids for output in llm.generate(["The os module", TEXT[:200]], GREEDY)]
        alone = [llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in ("The os module", TEXT[:200])]
    assert abs(found - plain) < NATS[kind][1]
    assert answers == alone


@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_ranks_have_the_same_weights(layout: dict[str, int], folders: dict[str, Path]) -> None:
    with model(folders["awq"]) as one, model(folders["awq"], **layout) as several:
        assert surprise(several) == pytest.approx(surprise(one), abs=5e-3)


def test_ranks_gather_the_columns_of_their_groups(folders: dict[str, Path], tmp_path: Path) -> None:
    """GPTQ with desc_act: the same matrices with their groups in another order."""
    shutil.copytree(folders["gptq"], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    for module in [name.removesuffix(".g_idx") for name in tensors if name.endswith(".g_idx")]:
        scales = tensors[f"{module}.scales"]
        order = torch.randperm(len(scales))
        tensors[f"{module}.scales"] = scales[order]
        tensors[f"{module}.g_idx"] = order.argsort()[tensors[f"{module}.g_idx"].long()].int()
    save_file(tensors, tmp_path / "model.safetensors")
    method = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    edit_json(tmp_path / "config.json", {"quantization_config": {**method, "desc_act": True}})
    assert all(form.gathered for form in stored_formats(tmp_path).values())
    with model(folders["gptq"]) as plain, model(tmp_path) as one, model(tmp_path, tensor_parallel_size=2) as several:
        assert surprise(one) == pytest.approx(surprise(plain), abs=5e-3)
        assert surprise(several) == pytest.approx(surprise(plain), abs=5e-3)


def test_float32_is_dequantized(folders: dict[str, Path]) -> None:
    with model(folders["W8A8"]) as llm, model(folders["W8A8"], dtype="float32") as exact:
        assert surprise(exact) == pytest.approx(surprise(llm), abs=0.02)


def test_it_is_not_quantized_again(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="int4 is not possible: the checkpoint is quantized already") as caught:
        resolve(engine_args(model=str(folders["W8A8"]), quantization="int4"))
    assert caught.value.field == "quantization"


def test_tiers_keep_it_apart(folders: dict[str, Path]) -> None:
    assert len({fingerprint_of(str(path), "auto", 0, "bfloat16").digest for path in (folders["W8A8"], folders["awq"], MODEL)}) == 3


def test_what_cannot_be_read_is_an_error_at_once(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["W8A8"], tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / "config.json", {"quantization_config": {"quant_method": "hqq", "nbits": 4}})
    with pytest.raises(UnsupportedModel, match="quant_method 'hqq' is not supported; supported: gptq, awq"):
        resolve(engine_args(model=str(tmp_path)))
