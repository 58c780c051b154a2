"""Models with experts and latent attention in 2 to 8 bits: the logits are those of the numbers that their codes stand for."""

import shutil
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from starling_engine import native
from starling_engine.attention.mla_torch import TorchMla
from starling_engine.attention.torch_paged import TorchPagedAttention
from starling_engine.layers.experts import ExpertsMethod
from starling_engine.layers.experts_select import select_experts_method
from starling_engine.layers.linear import LinearMethod
from starling_engine.layers.linear_quantized import ONLINE
from starling_engine.layers.linear_select import select_linear_method
from starling_engine.model_config.config import load_model_config
from starling_engine.models.decoder import Decoder
from starling_engine.native.group_quantized import quantize
from starling_engine.parallel.communicator import ALONE, Communicator
from starling_engine.weights.checkpoint import open_checkpoint, stored_formats
from starling_engine.weights.loader import load_weights
from starling_engine.weights.quantized.writer import SCHEMES, quantize_checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.engine.checkpoints import BASE, FAMILIES, VARIANTS, Variant, edit_json, write_checkpoint
from tests.engine.gguf_files import write_gguf
from tests.engine.paged_driver import PagedDriver
from tests.engine.parallel.threads import on_ranks
from tests.engine.quantized_checkpoints import compressed, write_quantized
from tests.engine.weights.test_loader import PROMPT
from tests.engine.weights.test_mxfp4_experts import write_pair

pytestmark = pytest.mark.skipif(native.load() is None, reason="this machine has no native kernels")

CPU, BF16 = torch.device("cpu"), torch.bfloat16
SIZES = {"moe_intermediate_size": 64, "q_lora_rank": 64}
PLAIN = ("norm.weight", "embed_tokens.weight", ".gate.weight", ".router.proj.weight", "kv_b_proj.weight")
ROUNDED = 0.06
"""Activations are rounded to 8 bits; sums of bfloat16 models differ by a percent besides."""


def variant(name: str) -> Variant:
    found = VARIANTS.get(name) or FAMILIES[name]
    return Variant(found.model_type, {**found.changes, **SIZES, "tie_word_embeddings": False})


def padded(name: str) -> Variant:
    """Another default would lie outside of the small vocabulary."""
    return Variant(FAMILIES[name].model_type, {**FAMILIES[name].changes, "pad_token_id": 0})


def answer(path: Path, quantization: str | None = None, *, codes: bool = False, ranks: Communicator = ALONE) -> torch.Tensor:
    config, stored = load_model_config(path), stored_formats(path) if codes else {}
    model = Decoder(
        config,
        BF16,
        CPU,
        select_linear_method(BF16, CPU, quantization, stored),
        TorchMla() if config.mla else TorchPagedAttention(),
        experts_method_selector=select_experts_method(BF16, CPU, quantization, stored),
        tensor=ranks,
    )
    load_weights(model, path)
    names = {method.name for method in methods(model)}
    assert ("quantized" in names or bool(names & ONLINE.keys())) == (codes or quantization is not None), names
    return PagedDriver(model, BF16, block_size=8, tensor=ranks.shard).run([(0, PROMPT)])[0].float()


def methods(model: Decoder) -> Iterator[LinearMethod | ExpertsMethod]:
    """Yields how the second layer that mixes tokens keeps its matrices, and its experts where it has them."""
    layer = [each for each in model._layers if each.attention is not None][1]
    yield layer.attention._o.method
    if layer.moe is not None:
        yield layer.moe.experts.method


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the median over tokens: a near tie may send one to other experts."""
    return ((actual - expected).norm(dim=1) / expected.norm(dim=1)).median().item()


@pytest.mark.parametrize("quantization", ONLINE)
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "deepseek-v3", "gemma4-moe"])
def test_a_model_that_is_quantized_while_it_is_loaded(name: str, quantization: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, variant(name), BF16)
    plain, found = answer(tmp_path), answer(tmp_path, quantization)
    tensors = load_file(tmp_path / "model.safetensors")
    for each, tensor in tensors.items():
        if tensor.ndim > 1 and not each.endswith(PLAIN):
            form = ONLINE[quantization].cut(0, tensor.shape[-1])
            assert form is not None
            tensors[each] = quantize(tensor.flatten(0, -2), form).dequantized().to(BF16).view(tensor.shape)
    save_file(tensors, tmp_path / "model.safetensors")
    expected = answer(tmp_path)
    assert difference(found, expected) < ROUNDED
    assert quantization != "int4" or difference(found, plain) > 1.5 * ROUNDED


@pytest.mark.parametrize("type_name", ["Q4_1", "Q8_0"])
def test_experts_of_a_gguf_file(type_name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, variant("qwen3-moe"), BF16)
    write_gguf(tmp_path / "m.gguf", tmp_path, lambda _: type_name)
    assert difference(answer(tmp_path / "m.gguf", codes=True), answer(tmp_path / "m.gguf")) < ROUNDED


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    """Its experts are multiplied in their codes, and the router sends tokens where it sends them with numbers."""
    write_pair(tmp_path / "plain", tmp_path / "codes")
    assert difference(answer(tmp_path / "codes", codes=True), answer(tmp_path / "plain")) < ROUNDED


def test_ranks_split_experts_in_mxfp4_by_whole_groups(tmp_path: Path) -> None:
    """Three groups on two ranks: `answer` sees that both multiply codes."""
    gpt_oss = VARIANTS["gpt-oss"]
    odd = Variant(gpt_oss.model_type, {**gpt_oss.changes, "intermediate_size": 96})
    write_pair(tmp_path / "plain", tmp_path / "codes", odd)
    expected = answer(tmp_path / "codes", codes=True)
    found = on_ranks(2, "gloo", lambda ranks: answer(tmp_path / "codes", codes=True, ranks=ranks))
    assert all(difference(each, expected) < ROUNDED for each in found)


def write_gptq(source: Path, target: Path, *, zeros: int) -> None:
    """Writes a checkpoint in GPTQ's tensors, as with desc_act: the groups of a matrix are of columns anywhere in its rows."""
    shutil.copytree(source, target)
    tensors, shifts = {}, torch.arange(0, 32, 4)
    for name, weight in load_file(source / "model.safetensors").items():
        if weight.ndim != 2 or name.endswith(PLAIN):
            tensors[name] = weight
            continue
        module, (n, k) = name.removesuffix(".weight"), weight.shape
        order = torch.randperm(k, generator=torch.Generator().manual_seed(zlib.crc32(module.replace("gate", "up").encode())))
        group_of = order // 32
        scales = torch.stack([weight[:, group_of == each].float().abs().amax(1) for each in range(k // 32)]).half() / 7
        codes = ((weight.float() / scales.float().T[:, group_of]).round() + zeros).clamp(0, 15).long()
        tensors[f"{module}.qweight"] = (codes.T.unflatten(0, (-1, 8)) << shifts[:, None]).sum(1).to(torch.int32)
        packed = torch.full((k // 32, n // 8), sum((zeros - 1) << int(shift) for shift in shifts))
        tensors[f"{module}.qzeros"] = packed.to(torch.int32)
        tensors |= {f"{module}.scales": scales, f"{module}.g_idx": group_of.to(torch.int32)}
    save_file(tensors, target / "model.safetensors")
    method = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": zeros == 8}
    edit_json(target / "config.json", {"quantization_config": method})


@pytest.mark.parametrize("zeros", [8, 7], ids=["symmetric", "zero points"])
def test_experts_of_gptq_with_columns_in_orders_of_their_own(zeros: int, tmp_path: Path) -> None:
    """Codes are multiplied, also on ranks that have some columns of each group, and give what numbers give."""
    write_checkpoint(tmp_path / "plain", variant("qwen3-moe"), BF16)
    write_gptq(tmp_path / "plain", tmp_path / "codes", zeros=zeros)
    expected = answer(tmp_path / "codes")
    assert 0.02 < difference(expected, answer(tmp_path / "plain")) < 0.5
    ranks = on_ranks(2, "gloo", lambda each: answer(tmp_path / "codes", codes=True, ranks=each))
    for found in (answer(tmp_path / "codes", codes=True), *ranks):
        assert difference(found, expected) < ROUNDED


QUANTIZED = [
    *("apertus", "arcee", "cohere2", "ernie", "ernie-moe", "glm4-moe", "gpt-neox", "granite", "hunyuan", "hunyuan-moe"),
    *("internlm3", "llama4", "minimax-m2", "nemotron-biases", "olmo3", "phi", "qwen2-moe", "qwen3-next-some-plain", "qwen3.5"),
    *("kimi-linear", "lfm2-biases", "lfm2-moe", "seed-oss", "smollm3", "stablelm", "starcoder2"),
    *("granite-hybrid", "bamba", "nemotron-h", "nemotron-h-experts", "falcon-h1", "deepseek-v3.2"),
    *("jamba", "mamba-biases", "falcon-mamba", "mamba2"),
]
"""Families whose matrices, biases or names are unlike those of Llama, Qwen and DeepSeek."""


@pytest.mark.whole
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_family_in_8_bits(name: str, tmp_path: Path) -> None:
    """Numbers are near the plain ones, and codes give what transformers makes of these numbers."""
    checkpoint = replace(padded(name), edits=FAMILIES[name].edits)
    write_checkpoint(tmp_path, checkpoint, BF16)
    plain, shown = tmp_path / "model.safetensors", tmp_path / "codes"
    if name == "llama4":
        save_file(with_single_experts(load_file(plain)), plain, {"format": "pt"})
    quantize_checkpoint(tmp_path, shown, SCHEMES["W8A8"])
    files, tensors = open_checkpoint(shown), load_file(plain)
    coded = [each for each, info in files.tensors.items() if info.form is not None]
    with files.open(shown / "model.safetensors") as file:
        for each in coded:
            numbers = file.read(each, ()).float()
            assert ((numbers - tensors[each].float()).abs().amax(1) <= tensors[each].float().abs().amax(1) / 200).all(), each
            tensors[each] = numbers.to(BF16)
    layers = load_model_config(tmp_path).layers
    assert len(coded) >= 2 * sum((layer.mixer != "none") + (layer.feed_forward != "none") for layer in layers)
    save_file(with_all_experts(tensors) if name == "llama4" else tensors, plain, {"format": "pt"})
    with torch.no_grad():
        expected = theirs(tmp_path, name)(torch.tensor([PROMPT])).logits[0]
    found = difference(answer(shown, codes=True), expected)
    print(f"{name}: {len(coded)} matrices in codes, difference {found:.4f}")
    assert found < ROUNDED


def theirs(folder: Path, name: str) -> PreTrainedModel:
    """Reads the tensors into the model that they came from: not all published configs are read by transformers."""
    config = CONFIG_MAPPING[FAMILIES[name].model_type](**{**BASE, **padded(name).changes})
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    return model.eval()


def with_single_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names each expert of Llama 4, as quantizers do."""
    split = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if not module.endswith(".experts"):
            split[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            parts = zip(("gate_proj", "up_proj"), matrix.T.chunk(2), strict=True) if "gate" in kind else [(kind, matrix.T)]
            split |= {f"{module}.{expert}.{part}.weight": rows.contiguous() for part, rows in parts}
    return split


def with_all_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Does the opposite."""
    single = {name: name.rpartition(".experts.") for name in tensors if ".experts." in name}
    joined = {name: tensor for name, tensor in tensors.items() if name not in single}
    for module in {f"{layer}.experts" for layer, _, _ in single.values()}:
        count = sum(name.startswith(f"{module}.") for name in single) // 3

        def all_of(part: str, module: str = module, count: int = count) -> torch.Tensor:
            return torch.stack([tensors[f"{module}.{expert}.{part}.weight"].T for expert in range(count)])

        joined[f"{module}.gate_up_proj"] = torch.cat([all_of("gate_proj"), all_of("up_proj")], dim=2)
        joined[f"{module}.down_proj"] = all_of("down_proj").contiguous()
    return joined


@pytest.mark.parametrize(
    ("checkpoint", "matrix"),
    [
        (variant("deepseek-v3"), "kv_a_proj"),
        (padded("phi3"), "qkv_proj"),
        (padded("glm4"), "gate_up_proj"),
        (padded("qwen3-next-some-plain"), "in_proj_qkvz"),
        (padded("qwen3.5"), "in_proj_qkv"),
        (padded("granite-hybrid"), "mamba.in_proj"),
    ],
    ids=["deepseek-v3", "phi3", "glm4", "qwen3-next", "qwen3.5", "granite-hybrid"],
)
def test_a_quantized_checkpoint_whose_matrices_are_not_llamas(checkpoint: Variant, matrix: str, tmp_path: Path) -> None:
    """Latent attention; one matrix for queries, keys and values; heads that rotate in pairs; Gated DeltaNets, gates; Mamba-2."""
    (tmp_path / "plain").mkdir()
    write_checkpoint(tmp_path / "plain", checkpoint, BF16)
    write_quantized(lambda: compressed("W8A8"), tmp_path / "plain", tmp_path)
    assert any(matrix in name for name in stored_formats(tmp_path))
    assert difference(answer(tmp_path, codes=True), answer(tmp_path)) < ROUNDED
