"""GGUF files of many families: the same model as the checkpoint that they were made from, in numbers and in codes."""

import json
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from starling_engine import native
from starling_engine.attention.mla_torch import TorchMla
from starling_engine.attention.torch_paged import TorchPagedAttention
from starling_engine.errors import ModelError, UnsupportedModel, WeightError
from starling_engine.gguf.families import FAMILIES
from starling_engine.gguf.metadata import GgufMetadata
from starling_engine.gguf.reader import GgufFile, open_gguf
from starling_engine.layers.experts_select import select_experts_method
from starling_engine.layers.linear_select import select_linear_method
from starling_engine.model_config.classifier import MAX_LABELS
from starling_engine.model_config.config import load_model_config
from starling_engine.model_config.rope import YarnScaling
from starling_engine.models.decoder import Decoder
from starling_engine.parallel.communicator import ALONE, Communicator
from starling_engine.params import PoolingParams
from starling_engine.topology.shard import Shard
from starling_engine.weights.checkpoint import open_checkpoint, stored_formats
from starling_engine.weights.loader import load_weights
from starling_engine.weights.safetensors_source import SINGLE

from tests.engine.checkpoints import write_checkpoint, write_servable
from tests.engine.encoder_checkpoints import CLASSIFIERS, write_encoder
from tests.engine.gguf_converter import ARCHITECTURES, convert
from tests.engine.gguf_files import entry, header, tensor, text, typed_entry
from tests.engine.gguf_variants import GGUF_ENCODERS, GGUF_VARIANTS, OTHER_NAMES
from tests.engine.models.test_encoders import answers
from tests.engine.paged_driver import PagedDriver
from tests.engine.parallel.threads import on_ranks
from tests.engine.weights import llama_cpp_steps
from tests.engine.weights.test_loader import CPU, PROMPT, loaded

OF_A_KIND = (
    "gemma3",
    "gpt-oss",
    "phi3-long",
    "lfm2",
    "granite-hybrid-experts",
    "qwen3-next",
    "qwen3.5-moe",
    "ernie-moe",
    "jamba",
    "gemma4-moe",
    "gemma4-inputs",
    "deepseek-v2-lite-dense",
    "deepseek-v3-yarn",
    "kimi-linear",
    "llama4-every-second",
    "ministral3",
)
"""Files in which, together, each thing that the converter does to tensors occurs; the others run in make test-all.

In make test those are read in parts (`test_ranks_have_parts_of_a_file`), which are the checkpoint's, too.
"""
ALL = [name if name in OF_A_KIND else pytest.param(name, marks=pytest.mark.whole) for name in GGUF_VARIANTS]
ELSEWHERE = {"llama", "qwen2", "qwen3", "qwen3moe"}
"""Architectures that `test_gguf.py` reads."""


def written(folder: Path, name: str, type_name: str = "F32", **changes: int) -> Path:
    """Writes a checkpoint into `folder`, and model.gguf of it, in which matrices have that type."""
    variant = GGUF_VARIANTS[name]
    write_checkpoint(folder, replace(variant, changes={**variant.changes, **changes}))
    convert(folder / "model.gguf", folder, lambda _: type_name, OTHER_NAMES.get(name, ""))
    return folder / "model.gguf"


@pytest.mark.parametrize("name", ALL)
def test_the_model_is_that_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    file = written(tmp_path, name)
    actual, expected = loaded(file), loaded(tmp_path)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5 * expected.abs().max().item())


@pytest.mark.parametrize(
    "name", [name if name in ("bert", "modernbert") else pytest.param(name, marks=pytest.mark.matrix) for name in GGUF_ENCODERS]
)
def test_an_encoder_is_that_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    write_encoder(tmp_path, GGUF_ENCODERS[name])
    convert(tmp_path / "model.gguf", tmp_path)
    wanted = [PoolingParams(pooling=kind, normalize=False) for kind in ("mean", "last", "mean", "cls")]
    actual, expected = (torch.tensor(answers(path, wanted)) for path in (tmp_path / "model.gguf", tmp_path))
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)
    assert load_model_config(tmp_path / "model.gguf").pooler.pooling == "mean"


def test_every_family_is_read_by_a_test() -> None:
    decoders = {each.model_type for each in GGUF_VARIANTS.values()}
    encoders = {getattr(transformers, each.config).model_type for each in GGUF_ENCODERS.values()} - {"gemma3_text"}
    names = {ARCHITECTURES.get(each, each) for each in decoders | encoders} | {*OTHER_NAMES.values()}
    assert names | ELSEWHERE | {"nemotron_h_moe", "gemma-embedding"} == FAMILIES.keys()


CODES = {
    "phi3": ("Q4_0", {}),
    "qwen3.5-moe": ("Q8_0", {"linear_value_head_dim": 32, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}),
    "gpt-oss": ("MXFP4", {}),
    "gpt-neox": ("Q4_0", {}),
    "gemma4-moe": ("Q4_0", {"moe_intermediate_size": 64}),
    "gemma4-inputs": ("Q8_0", {"hidden_size_per_layer_input": 32}),
    "deepseek-v3": ("Q8_0", {"q_lora_rank": 32, "qk_nope_head_dim": 32, "moe_intermediate_size": 64}),
}
"""Types, and sizes of whole blocks.

They are of rows with others beside them, of columns in another order, of experts alone or in pairs, and of tables.
"""


@pytest.mark.parametrize("name", CODES)
def test_codes_are_those_of_their_numbers(name: str, tmp_path: Path) -> None:
    """Codes of rows and of columns that the converter brought into another order are in the checkpoint's."""
    type_name, changes = CODES[name]
    file = written(tmp_path, name, type_name, **changes)
    files, plain = open_checkpoint(file), open_checkpoint(tmp_path)
    close, coded = 0.3 if type_name == "MXFP4" else 0.15, 0
    with files.open(file) as reader, plain.open(tmp_path / "model.safetensors") as original:
        for each, info in files.tensors.items():
            if info.form is None:
                continue
            coded += 1
            whole = reader.read(each, ())
            torch.testing.assert_close(reader.read_codes(each, ()).dequantized(), whole, rtol=0, atol=0)
            part = (slice(16, 32), slice(whole.shape[1] - 32, whole.shape[1]))
            assert torch.equal(reader.read_codes(each, part).dequantized(), whole[part])
            assert torch.equal(reader.read(each, part), whole[part])
            if each in plain.tensors:
                found = original.read(each, ())
                assert (whole - found).abs().mean() < close * found.abs().mean(), each
    assert coded > 8 and loaded(file).isfinite().all()


SPLIT = ("phi3-long", "qwen3.5-moe")
"""Rows with others beside them, rows and columns in another order, experts: of the others make test takes samples."""


def answer(
    path: Path, dtype: torch.dtype, ranks: Communicator = ALONE, stages: int = 1, prompt: list[int] = PROMPT
) -> torch.Tensor:
    """Returns the logits of the prompt. In bfloat16 the file's codes are multiplied."""
    config, stored = load_model_config(path), stored_formats(path) if dtype == torch.bfloat16 else {}
    linear = select_linear_method(dtype, CPU, None, stored)
    experts = select_experts_method(dtype, CPU, None, stored)
    models = [
        Decoder(
            config,
            dtype,
            CPU,
            linear,
            TorchMla() if config.mla else TorchPagedAttention(),
            experts_method_selector=experts,
            tensor=ranks,
            stage=Shard(at, stages),
        )
        for at in range(stages)
    ]
    for model in models:
        load_weights(model, path)
    return PagedDriver(models[0], dtype, block_size=8, tensor=ranks.shard, later=models[1:]).run([(0, prompt)])[0].float()


@pytest.mark.parametrize("split", ["two ranks", "two stages"])
@pytest.mark.parametrize(
    "name", [name if name in SPLIT else pytest.param(name, marks=pytest.mark.matrix) for name in GGUF_VARIANTS]
)
def test_ranks_have_parts_of_a_file(name: str, split: str, tmp_path: Path) -> None:
    if (name, split) == ("gemma4-inputs", "two stages"):
        pytest.skip("later stages do not know token ids")
    file, dtype = written(tmp_path, name), torch.float32
    expected = loaded(tmp_path)
    parts = [answer(file, dtype, stages=2)] if split == "two stages" else on_ranks(2, "gloo", lambda r: answer(file, dtype, r))
    for found in parts:
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * expected.abs().max().item())


@pytest.mark.skipif(native.load() is None, reason="this machine has no native kernels")
@pytest.mark.parametrize("split", ["two ranks", "two stages"])
@pytest.mark.parametrize("name", ["qwen3.5-moe", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("phi3", "gpt-oss"))])
def test_ranks_have_parts_of_codes(name: str, split: str, tmp_path: Path) -> None:
    type_name, changes = CODES[name]
    file, dtype = written(tmp_path, name, type_name, **changes), torch.bfloat16
    expected = answer(file, dtype)
    parts = [answer(file, dtype, stages=2)] if split == "two stages" else on_ranks(2, "gloo", lambda r: answer(file, dtype, r))
    for found in parts:
        differ = (found - expected).norm(dim=1) / expected.norm(dim=1)
        assert differ.median() < 0.06  # a near tie may send a token to other experts


WIDE_INDEX = {"index_head_dim": 64}
_ALIKE = (
    *("ministral3", "deepseek-v3-yarn", "glm4-moe", "glm4-moe-lite", "kimi-linear-plain", "llama4", "apertus", "minimax-m2"),
    *("nemotron-biases", "stablelm", "stablelm-parallel", "granite-moe-shared", "qwen2-moe", "qwen2-vl", "qwen3-next"),
    *("falcon-h1-normed", "mamba2", "hunyuan-moe", "cohere2", "exaone4-full", "olmo2", "smollm3", "gemma4"),
)
JUDGED: dict[str, dict[str, float]] = {
    **{name: {} for name in _ALIKE},
    "gemma4-moe": {"final_logit_softcapping": 10.0},
    "deepseek-v3.2": WIDE_INDEX,
    "glm-5": WIDE_INDEX,
    "glm-5.2": WIDE_INDEX,
}
"""Variants that llama.cpp reads as they are meant, with what it needs.

It turns keys of indexers 64 elements at once, and caps logits of Gemma 4 where a file does not say so.
"""


JUDGED_FIRST = (
    "apertus",
    "hunyuan-moe",
    "ministral3",
    "glm4-moe-lite",
    "kimi-linear-plain",
    "llama4",
    "qwen3-next",
    "falcon-h1-normed",
    "gemma4-moe",
    "glm-5.2",
)
"""Files of each kind of mixer, of experts, of scaled queries: the others, which say no more, run in make test-all."""


@pytest.mark.parametrize("name", [name if name in JUDGED_FIRST else pytest.param(name, marks=pytest.mark.whole) for name in JUDGED])
def test_llama_cpp_says_the_same_of_a_file(name: str, tmp_path: Path) -> None:
    """Compares each step by itself: llama.cpp's server leaves tokens of half a character out of a longer answer's list."""
    variant = GGUF_VARIANTS[name]
    write_servable(tmp_path, replace(variant, changes={**variant.changes, **JUDGED[name]}))
    convert(tmp_path / "model.gguf", tmp_path, architecture=OTHER_NAMES.get(name, ""))
    prompt = torch.randint(300, 4000, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    ours = answer(tmp_path / "model.gguf", torch.float32, prompt=prompt).log_softmax(-1)
    lengths = (1, 5, 9, 17, 21, 33, 47, 60)
    done = subprocess.run(
        [sys.executable, llama_cpp_steps.__file__, str(tmp_path / "model.gguf")],
        input=json.dumps([prompt[:length] for length in lengths]),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    compared = json.loads(done.stdout)
    assert sum(map(bool, compared)) > 4
    for length, tops in zip(lengths, compared, strict=True):
        for token, log_p in tops:
            assert ours[length - 1, token].item() == pytest.approx(log_p, abs=1e-3), length


def test_what_no_file_can_say_is_an_error(tmp_path: Path) -> None:
    data = written(tmp_path, "qwen3.5").read_bytes()
    fewer = tmp_path / "fewer.gguf"
    fewer.write_bytes(data.replace(b"qwen35.ssm.group_count\x04\0\0\0\x02", b"qwen35.ssm.group_count\x04\0\0\0\x04"))
    with pytest.raises(WeightError, match=r"ssm_conv1d\.weight \[128, 4\] has fewer than 192 rows"):
        open_checkpoint(fewer)
    decay = bytearray(data)
    start = GgufFile(tmp_path / "model.gguf").tensors["blk.0.ssm_a"].start
    decay[start : start + 4] = bytes(4)
    fewer.write_bytes(decay)
    with pytest.raises(WeightError, match=r"layers\.0\.linear_attn\.A_log has decays that are not below 0"):
        loaded(fewer)


def test_decays_may_have_a_dimension_more(tmp_path: Path) -> None:
    """Those of some heads lie in another order, whatever their shape says."""
    file = open_gguf(written(tmp_path, "qwen3.5"))
    decays = file.tensors["blk.0.ssm_a"]
    file.tensors = {**file.tensors, decays.name: replace(decays, shape=(*decays.shape, 1))}
    with open_checkpoint(file.path).open(file.path) as reader, open_checkpoint(tmp_path).open(tmp_path / SINGLE) as original:
        name = "model.layers.0.linear_attn.A_log"
        torch.testing.assert_close(reader.read(name, ()), original.read(name, ()))


def test_rows_of_no_heads_are_an_error(tmp_path: Path) -> None:
    data = written(tmp_path, "granite-hybrid").read_bytes()
    count = b"granitehybrid.block_count\x04\0\0\0"
    at = data.index(count) + len(count)
    (tmp_path / "one.gguf").write_bytes(data[:at] + struct.pack("<I", 1) + data[at + 4 :])
    with pytest.raises(WeightError, match=r"blk\.\d\.attn_[qk]\.weight .* no 0 heads"):
        open_checkpoint(tmp_path / "one.gguf")


@pytest.mark.parametrize("name", ["roberta", "distilbert", "modernbert-mean"])
def test_a_head_of_an_encoder_is_that_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    """No file says of RoBERTa that its head scores pairs."""
    write_encoder(tmp_path, CLASSIFIERS[name])
    convert(tmp_path / "model.gguf", tmp_path)
    wanted = [PoolingParams(task="classify", pooling="mean" if "mean" in name else "cls", normalize=False) for _ in range(4)]
    actual, expected = (torch.tensor(answers(path, wanted)) for path in (tmp_path / "model.gguf", tmp_path))
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)
    ours, theirs = (load_model_config(path).classifier for path in (tmp_path / "model.gguf", tmp_path))
    assert ours is not None and theirs is not None
    assert (ours.labels, ours.score_activation) == (theirs.labels, theirs.score_activation)


@pytest.mark.parametrize(
    ("entries", "tensors", "message"),
    [
        ({"pooling_type": 4}, (), r"bert\.gguf: cls\.weight is missing: .*; serve the original checkpoint"),
        ({}, ("cls.output.weight",), r"bert\.gguf: cls\.weight is missing"),
        ({}, ("cls.weight",), r"bert\.gguf: cls\.output\.weight is missing"),
        ({"pooling_type": 4}, ("cls.output.weight",), r"qwen3\.pooling_type rank is not supported without cls\.output\.weight"),
        ({"pooling_type": 4}, (), r"llama\.pooling_type rank is not supported: serve the original checkpoint"),
        ({}, ("cls.output.weight",), r"llama\.gguf: cls\.output\.weight: heads are not supported for this architecture"),
    ],
)
def test_a_head_that_is_not_whole_is_refused(
    entries: dict[str, int], tensors: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    architecture = message.partition("\\")[0]
    sizes = ("embedding_length", "block_count", "feed_forward_length", "context_length", "attention.head_count", "vocab_size")
    numbers = {**dict.fromkeys(sizes, 64), **entries, "attention.layer_norm_rms_epsilon": 1e-5}
    written = [typed_entry(f"{architecture}.{name}", each) for name, each in numbers.items()]
    written.insert(0, entry("general.architecture", 8, text(architecture)))
    data = header(
        entries=b"".join(written),
        entry_count=len(written),
        tensors=b"".join(tensor(name, (8, 8)) for name in tensors),
        tensor_count=len(tensors),
    )
    path = tmp_path / f"{architecture}.gguf"
    path.write_bytes(data.ljust(1 << 12, b"\0"))
    with pytest.raises(UnsupportedModel, match=message):
        load_model_config(path)


def test_a_head_of_more_labels_than_any_has_is_refused(tmp_path: Path) -> None:
    sizes = ("embedding_length", "block_count", "feed_forward_length", "context_length", "attention.head_count", "vocab_size")
    numbers = {**dict.fromkeys(sizes, 64), "attention.layer_norm_rms_epsilon": 1e-5}
    numbers["attention.head_count"] = 1
    entries = [typed_entry(f"bert.{name}", each) for name, each in numbers.items()]
    entries.insert(0, entry("general.architecture", 8, text("bert")))
    rows = MAX_LABELS + 1
    tensors = tensor("cls.output.weight", (rows, 1)) + tensor("cls.weight", (1, 1), offset=1 << 20)
    data = header(entries=b"".join(entries), entry_count=len(entries), tensors=tensors, tensor_count=2)
    (tmp_path / "model.gguf").write_bytes(data.ljust(1 << 21, b"\0"))
    with pytest.raises(ModelError, match=f"num_labels must be at most {MAX_LABELS}"):
        load_model_config(tmp_path / "model.gguf")


def test_dense_layers_behind_the_pooling_are_refused(tmp_path: Path) -> None:
    sizes = ("embedding_length", "block_count", "feed_forward_length", "context_length", "attention.head_count", "vocab_size")
    numbers = {**dict.fromkeys(sizes, 64), "attention.layer_norm_rms_epsilon": 1e-5}
    entries = [typed_entry(f"gemma-embedding.{name}", each) for name, each in numbers.items()]
    entries.insert(0, entry("general.architecture", 8, text("gemma-embedding")))
    data = header(entries=b"".join(entries), entry_count=len(entries), tensors=tensor("dense_2.weight", (8, 8)))
    (tmp_path / "model.gguf").write_bytes(data.ljust(1 << 12, b"\0"))
    with pytest.raises(UnsupportedModel, match=r"dense_2\.weight is not supported: dense layers behind the pooling"):
        load_model_config(tmp_path / "model.gguf")


def test_a_number_of_thousands_of_digits_is_of_no_layer(tmp_path: Path) -> None:
    name = f"blk.{'9' * 5000}.attn_q.weight"
    (tmp_path / "model.gguf").write_bytes(header(tensors=tensor(name, (1, 1)).ljust(1 << 13, b"\0")))
    assert GgufMetadata(GgufFile(tmp_path / "model.gguf")).modules == frozenset()


def test_layers_that_differ_are_refused(tmp_path: Path) -> None:
    """A number of each layer is the model's, if it is the same in all layers that have one."""
    entries = entry("general.architecture", 8, text("lfm2"))
    for name, numbers in (("head_count_kv", (0, 2, 4)), ("head_count", (4, 0, 4))):
        entries += entry(f"lfm2.attention.{name}", 9, struct.pack("<IQ3I", 4, 3, *numbers))
    (tmp_path / "model.gguf").write_bytes(header(entries=entries, entry_count=3))
    data = GgufMetadata(GgufFile(tmp_path / "model.gguf"))
    assert data.number("attention.head_count") == 4
    with pytest.raises(UnsupportedModel, match=r"lfm2\.attention\.head_count_kv: layers that differ are not supported"):
        data.number("attention.head_count_kv")


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("deepseek2", {"expert_gating_func": 3}, "expert_gating_func 3 is not supported; supported: 1, 2"),
        ("deepseek2", {"attention.temperature_scale": 0.1}, "attention.temperature_scale is not supported for this architecture"),
        ("lfm2", {"expert_gating_func": 1}, "expert_gating_func 1 is not supported; supported: 2"),
        ("kimi-linear", {"expert_gating_func": 1}, "expert_gating_func 1 is not supported; supported: 2"),
        ("mistral4", {"expert_gating_func": 2}, "expert_gating_func 2 is not supported; supported: 1"),
        *(
            (
                name,
                {"attention.temperature_scale": 0.1, "attention.temperature_length": 7, "rope.scaling.original_context_length": 8},
                "attention.temperature_length 7 is not supported; supported: 8, the length of YaRN",
            )
            for name in ("mistral3", "mistral4")
        ),
    ],
)
def test_a_feature_that_no_family_here_has_is_refused(
    architecture: str, fields: dict[str, float], message: str, tmp_path: Path
) -> None:
    sizes = ("embedding_length", "block_count", "feed_forward_length", "context_length", "attention.head_count", "vocab_size")
    numbers = {**dict.fromkeys((*sizes, "expert_count", "expert_used_count"), 64), "attention.layer_norm_rms_epsilon": 1e-5}
    entries = [typed_entry(f"{architecture}.{name}", each) for name, each in {**numbers, **fields}.items()]
    entries.insert(0, entry("general.architecture", 8, text(architecture)))
    (tmp_path / "model.gguf").write_bytes(header(entries=b"".join(entries), entry_count=len(entries)))
    with pytest.raises(UnsupportedModel, match=f"{architecture}.{message}"):
        load_model_config(tmp_path / "model.gguf")


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4096}


def yarn_file(folder: Path, fields: dict[str, float | str], rule: str = "deepseek-v3") -> Path:
    """Writes metadata of DeepSeek, or of Kimi K2 by its rule for text, with YaRN."""
    sizes = ("embedding_length", "block_count", "feed_forward_length", "context_length", "attention.head_count", "vocab_size")
    latents = {"attention.kv_lora_rank": 32, "rope.dimension_count": 16, "attention.key_length": 48, "attention.value_length": 32}
    latents["leading_dense_block_count"] = 64  # there are no experts
    numbers = {**dict.fromkeys(sizes, 64), **latents, "attention.layer_norm_rms_epsilon": 1e-5, **YARN, **fields}
    entries = [typed_entry(f"deepseek2.{name}", each) for name, each in numbers.items()]
    entries += [entry("general.architecture", 8, text("deepseek2")), entry("tokenizer.ggml.pre", 8, text(rule))]
    (folder / "model.gguf").write_bytes(header(entries=b"".join(entries), entry_count=len(entries)))
    return folder / "model.gguf"


@pytest.mark.parametrize(
    ("rule", "fields", "expected"),
    [
        ("kimi-k2", {}, 1.0),
        ("kimi-k2", {"rope.scaling.yarn_beta_fast": 16.0}, 16.0),
        ("deepseek-v3", {}, 32.0),
    ],
)
def test_kimi_k2_has_a_band_of_its_own(rule: str, fields: dict[str, float | str], expected: float, tmp_path: Path) -> None:
    """Older files do not say it."""
    scaling = load_model_config(yarn_file(tmp_path, fields, rule)).ropes[0].scaling
    assert isinstance(scaling, YarnScaling) and scaling.beta_fast == expected


@pytest.mark.parametrize("value", ["0.1", float("nan"), float("inf"), -0.1])
def test_a_multiplier_that_is_no_number_is_named(value: float | str, tmp_path: Path) -> None:
    path = yarn_file(tmp_path, {"rope.scaling.yarn_log_multiplier": value})
    with pytest.raises(ModelError, match=r"deepseek2\.rope\.scaling\.yarn_log_multiplier must be a number above 0"):
        load_model_config(path)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (None, r"blk\.0\.attn_v_b\.weight is missing beside blk\.0\.attn_k_b\.weight"),
        (
            (4, 16, 16),
            r"blk\.0\.attn_k_b\.weight \[4, 32, 16\] and blk\.0\.attn_v_b\.weight \[4, 16, 16\] are not of the same heads",
        ),
        ((4, 16), r"blk\.0\.attn_v_b\.weight \[4, 16\] are not of the same heads"),
    ],
)
def test_halves_of_a_matrix_that_do_not_fit_are_an_error(shape: tuple[int, ...] | None, message: str, tmp_path: Path) -> None:
    file = open_gguf(written(tmp_path, "deepseek-v3"))
    values = file.tensors["blk.0.attn_v_b.weight"]
    file.tensors = {name: tensor for name, tensor in file.tensors.items() if name != values.name}
    if shape is not None:
        file.tensors |= {values.name: replace(values, shape=shape)}
    with pytest.raises(WeightError, match=message):
        open_checkpoint(file.path)
