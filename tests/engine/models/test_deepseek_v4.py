"""DeepSeek-V4 beside what `test_families.py` compares: its authors' checkpoints, in FP8 and FP4, and bfloat16."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from starling_engine import native
from starling_engine.attention.compressed import CompressedAttention
from starling_engine.errors import WeightError
from starling_engine.layers.experts_select import select_experts_method
from starling_engine.layers.linear_select import select_linear_method
from starling_engine.model_config.config import load_model_config
from starling_engine.models.decoder import Decoder
from starling_engine.native.group_quantized import E2M1
from starling_engine.weights.checkpoint import stored_formats
from starling_engine.weights.dummy import load_dummy
from starling_engine.weights.loader import load_weights
from transformers import AutoModelForCausalLM

from tests.engine.checkpoints import FAMILIES, VOCAB, Variant, edit_json, write_checkpoint
from tests.engine.models.test_decoder import TOLERANCE
from tests.engine.paged_driver import PagedDriver

CPU, FP32, BF16 = torch.device("cpu"), torch.float32, torch.bfloat16
CHUNKS = (30, 1, 1, 28)
TEXT = torch.randint(0, VOCAB, (sum(CHUNKS),), generator=torch.Generator().manual_seed(3))
NAMES = {
    "model.embed_tokens.": "embed.",
    "model.hc_head.hc_": "hc_head_",
    ".attn.norm.": ".attn.kv_norm.",
    "model.": "",
}
"""Names of tensors as transformers has saved them, and as the authors have them."""
IN_8_BITS = re.compile(r".*\.(wq_a|wq_b|wkv|wo_a|wo_b|shared_experts\.w[123])\.weight")
IN_4_BITS = re.compile(r".*\.experts\.\d+\.w[123]\.weight")


def answer(path: Path, dtype: torch.dtype = FP32, quantization: str | None = None, *, codes: bool = False) -> torch.Tensor:
    stored = stored_formats(path) if codes else {}
    methods, experts = (each(dtype, CPU, quantization, stored) for each in (select_linear_method, select_experts_method))
    model = Decoder(load_model_config(path), dtype, CPU, methods, CompressedAttention(), experts_method_selector=experts)
    load_weights(model, path)
    driver = PagedDriver(model, dtype, block_size=8)
    return torch.cat([driver.run([(0, chunk.tolist())])[0].float() for chunk in TEXT.split(CHUNKS)])


def sized(name: str) -> Variant:
    """Rows of whole groups of codes, and a padding token within the vocabulary."""
    sizes = {"moe_intermediate_size": 64, "q_lora_rank": 64, "index_head_dim": 32, "o_lora_rank": 32, "pad_token_id": 0}
    return Variant(FAMILIES[name].model_type, {**FAMILIES[name].changes, **sizes}, FAMILIES[name].edits)


def expected_of(path: Path) -> torch.Tensor:
    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(path, dtype=FP32).eval()(TEXT[None]).logits[0]


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The median of the first tokens' errors, before an indexer chooses among near ties."""
    found, expected = found[:16], expected[:16]
    error = float(((found - expected).norm(dim=1) / expected.norm(dim=1)).median())
    print(f"error: {error:.4f}")
    return error


def authors_name(name: str) -> str:
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def in_8_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, exponents of each 128 by 128, and the numbers that they are."""
    exponents = torch.randint(118, 120, (-(-weight.shape[0] // 128), -(-weight.shape[1] // 128)), dtype=torch.uint8)
    scales = torch.exp2(exponents.float() - 127).repeat_interleave(128, 0).repeat_interleave(128, 1)
    scales = scales[: weight.shape[0], : weight.shape[1]]
    codes = (weight / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, exponents.view(torch.float8_e8m0fnu), codes.float() * scales


def in_4_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two codes in a byte, exponents of each 32 columns, and the numbers that they are."""
    exponents = torch.randint(123, 126, (weight.shape[0], weight.shape[1] // 32), dtype=torch.uint8)
    scales = torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    table = torch.tensor(E2M1).float() / 2
    codes = ((weight / scales)[..., None] - table).abs().argmin(-1).to(torch.uint8)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8)
    return packed, exponents.view(torch.float8_e8m0fnu), table[codes.long()] * scales


def test_weights_in_8_and_4_bits_as_they_are_published(tmp_path: Path) -> None:
    """Numbers are those that transformers computes with; names are the authors'. Parts for drafts are left out."""
    write_checkpoint(tmp_path / "numbers", sized("deepseek-v4-published"))
    shutil.copytree(tmp_path / "numbers", tmp_path / "published")
    tensors = load_file(tmp_path / "numbers" / "model.safetensors")
    published = {"mtp.0.emb.tok_emb.weight": torch.zeros(4, 4)}
    for name, weight in tensors.items():
        coded = in_8_bits if IN_8_BITS.fullmatch(name) and "compressor" not in name else in_4_bits
        if coded is in_8_bits or IN_4_BITS.fullmatch(name):
            codes, scales, tensors[name] = coded(weight)
            published |= {authors_name(name): codes, authors_name(name).replace(".weight", ".scale"): scales}
        else:
            published[authors_name(name)] = weight.int() if name.endswith("tid2eid") else weight
    assert {"embed.weight", "head.weight", "norm.weight", "hc_head_fn", "layers.0.attn.indexer.wq_b.scale"} <= published.keys()
    save_file(tensors, tmp_path / "numbers" / "model.safetensors", metadata={"format": "pt"})
    save_file(published, tmp_path / "published" / "model.safetensors", metadata={"format": "pt"})
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0"}
    method |= {"weight_block_size": [128, 128]}
    edit_json(tmp_path / "published" / "config.json", {"quantization_config": method, "expert_dtype": "fp4"})
    expected = expected_of(tmp_path / "numbers")
    torch.testing.assert_close(answer(tmp_path / "published"), expected, atol=TOLERANCE, rtol=0)
    if native.load() is not None:
        assert error_of(answer(tmp_path / "published", BF16, codes=True), expected) < 0.1


def test_a_table_of_experts_that_are_not_there_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, FAMILIES["deepseek-v4"])
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.ffn.gate.tid2eid"][7, 1] = 8
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightError, match=r"layers\.1\.ffn\.gate\.tid2eid must name experts from 0 to 7"):
        answer(tmp_path)


def test_dummy_weights_answer_too(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, FAMILIES["deepseek-v4"])
    methods = select_linear_method(FP32, CPU)
    model = Decoder(load_model_config(tmp_path), FP32, CPU, methods, CompressedAttention())
    load_dummy(model, 0)
    (logits,) = PagedDriver(model, FP32, block_size=16).run([(0, TEXT.tolist())])
    assert logits.isfinite().all() and logits.argmax(-1).unique().numel() > 5


def test_bfloat16_and_8_bits_are_near(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, sized("deepseek-v4"), BF16)
    expected = expected_of(tmp_path)
    assert error_of(answer(tmp_path, BF16), expected) < 0.05
    if native.load() is not None:
        assert error_of(answer(tmp_path, BF16, "int8"), expected) < 0.1
