"""Loading checkpoints: every tensor at its place, and every way in which one can be wrong is named.

Long, since each way is a short test of the same few checkpoints.
"""

import json
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from starling_engine.attention.mla_torch import TorchMla
from starling_engine.attention.torch_paged import TorchPagedAttention
from starling_engine.errors import ModelError, WeightError
from starling_engine.layers.linear_select import select_linear_method
from starling_engine.model_config import tied_head
from starling_engine.model_config.base_model import model_names
from starling_engine.model_config.config import load_model_config
from starling_engine.models.decoder import Decoder
from starling_engine.weights.dummy import load_dummy
from starling_engine.weights.loader import load_weights
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Llama4Config,
    Llama4ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.models.kimi_k25 import Kimi_K25Config, Kimi_K25ForConditionalGeneration
from transformers.models.qwen3_5 import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from tests.engine.checkpoints import BASE, EXPERTS, FAMILIES, VARIANTS, edit_json, spread, write_checkpoint
from tests.engine.paged_driver import PagedDriver

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]
EMBEDDING, HEAD, UP = "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight"
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def empty_model(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    config = load_model_config(folder)
    attention = TorchMla() if config.mla else TorchPagedAttention()
    return Decoder(config, dtype, CPU, select_linear_method(dtype, CPU), attention)


def logits(model: Decoder, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return PagedDriver(model, dtype, block_size=8).run([(0, PROMPT)])[0]


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = empty_model(folder, dtype)
    load_weights(model, folder)
    return logits(model, dtype)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, VARIANTS["qwen2"])
    return tmp_path


@pytest.fixture
def rewrite(folder: Path) -> Callable[[Callable[[Tensors], object]], None]:
    """Changes the tensors of the checkpoint's file."""

    def apply(change: Callable[[Tensors], object]) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def test_shards_hold_the_same_as_one_file(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    sharded = tmp_path_factory.mktemp("sharded")
    write_checkpoint(sharded, VARIANTS["qwen2"], max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert torch.equal(loaded(sharded), loaded(folder))


def test_converts_to_the_dtype_that_is_asked_for(folder: Path, rewrite: Callable[..., None]) -> None:
    whole = loaded(folder)
    rewrite(lambda tensors: tensors.update({name: tensor.half() for name, tensor in tensors.items()}))
    torch.testing.assert_close(loaded(folder), whole, atol=0.05, rtol=0)
    torch.testing.assert_close(loaded(folder, torch.bfloat16), whole, atol=0.5, rtol=0)


def saved_as_base_model(folder: Path) -> torch.Tensor:
    """Returns the last token's logits [1, VOCAB], which nobody asks for: those of a tied head."""
    model = AutoModel.from_pretrained(folder)
    model.save_pretrained(folder)
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).last_hidden_state[0, -1:] @ model.get_input_embeddings().weight.T


def test_a_base_model_has_names_without_a_prefix_and_no_head(folder: Path, rewrite: Callable[..., None]) -> None:
    expected = saved_as_base_model(folder)
    config = load_model_config(folder)
    assert (config.architecture, config.has_lm_head) == ("Qwen2ForCausalLM", False)
    torch.testing.assert_close(loaded(folder)[-1:], expected, atol=1e-4, rtol=1e-4)
    rewrite(lambda tensors: tensors.pop("norm.weight"))
    with pytest.raises(WeightError, match=r"model.norm.weight is missing"):
        loaded(folder)


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("gpt2", "transformer."), ("gpt2-untied", "transformer."), ("opt", "model."), ("opt-without-biases", "model.")],
)
def test_published_files_may_lack_the_beginning_of_all_names(name: str, prefix: str, tmp_path: Path) -> None:
    """GPT-2's have the masks of its layers, too. A head's name has no such beginning."""
    write_checkpoint(tmp_path, FAMILIES[name])
    expected = loaded(tmp_path)
    tensors = {each.removeprefix(prefix): tensor for each, tensor in load_file(tmp_path / "model.safetensors").items()}
    masks = {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.0.attn.masked_bias": torch.tensor(-1e4)} if "gpt2" in name else {}
    save_file({**tensors, **masks}, tmp_path / "model.safetensors")
    assert load_model_config(tmp_path).has_lm_head
    assert torch.equal(loaded(tmp_path), expected)


def test_a_head_beside_names_without_their_beginning_has_its_own_name() -> None:
    names = ["wte.weight", "score.weight", "lm_head.weight", "classifier.bias"]
    assert model_names(names) == {f"transformer.{names[0]}": names[0], **{each: each for each in names[1:]}}


@pytest.mark.parametrize("name", ["gpt2", "gpt2-untied", "opt", "opt-without-biases"])
def test_a_base_model_has_a_head_where_that_is_tied(name: str, tmp_path: Path) -> None:
    """Published files of GPT-2 and OPT have the names of base models, too, and answers."""
    write_checkpoint(tmp_path, FAMILIES[name])
    expected = saved_as_base_model(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] in (["GPT2Model"], ["OPTModel"])
    assert load_model_config(tmp_path).has_lm_head == (name in ("gpt2", "opt"))
    torch.testing.assert_close(loaded(tmp_path)[-1:], expected, atol=1e-4, rtol=1e-4)


def test_the_base_model_of_gemma_3_is_named_after_text(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, FAMILIES["gemma3"])
    expected = saved_as_base_model(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Gemma3TextModel"]
    torch.testing.assert_close(loaded(tmp_path)[-1:], expected, atol=1e-4, rtol=1e-4)


def test_progress_counts_every_byte(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_weights(empty_model(folder), folder, lambda done, total: seen.append((done, total)))
    size = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert {total for _, total in seen} == {size} and seen[-1][0] == size


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(UP), [UP, "is missing"]),
        (lambda t: t.pop("model.layers.0.self_attn.k_proj.bias"), ["k_proj.bias", "is missing"]),
        (lambda t: [t.pop(name) for name in list(t) if "mlp" in name], ["and 4 more is missing"]),
        (lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.zeros(2)}), ["layers.3", "not known"]),
        (lambda t: t.update({"model.layers.0.mlp.up_proj.bias": torch.ones(128)}), ["up_proj.bias", "not known"]),
        (lambda t: t.update({UP: torch.zeros(64, 128)}), [UP, "[64, 128]", "[128, 64]", "wrong shape"]),
        (lambda t: t.update({"model.norm.weight": torch.zeros(1)}), ["model.norm.weight", "[1]", "[64]"]),
        (lambda t: t.update({UP: torch.zeros(128, 64, dtype=torch.int8)}), [UP, "I8", "dtype"]),
    ],
)
def test_a_wrong_tensor_is_named(
    change: Callable[[Tensors], object], words: list[str], folder: Path, rewrite: Callable[..., None]
) -> None:
    rewrite(change)
    with pytest.raises(WeightError) as caught:
        loaded(folder)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("name", ["rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "q_scale"])
def test_what_changes_no_token_is_ignored(name: str, folder: Path, rewrite: Callable[..., None]) -> None:
    """Adds buffers that old checkpoints saved, or the scale of queries beside those of a cache in fp8."""
    before = loaded(folder)
    rewrite(lambda tensors: tensors.update({f"model.layers.0.self_attn.{name}": torch.zeros(8)}))
    assert torch.equal(loaded(folder), before)


def test_layers_that_draft_are_not_loaded(tmp_path: Path) -> None:
    """DeepSeek-V3 is published with one layer more than the model has, for speculative decoding."""
    write_checkpoint(tmp_path, VARIANTS["deepseek-v3-dense"])
    file, extra = tmp_path / "model.safetensors", torch.zeros(64, 128)
    tensors, before = load_file(file), loaded(tmp_path)
    save_file({**tensors, "model.layers.3.eh_proj.weight": extra}, file)
    assert torch.equal(loaded(tmp_path), before)
    save_file({**tensors, "model.layers.4.eh_proj.weight": extra}, file)
    with pytest.raises(WeightError, match=r"layers\.4\.eh_proj\.weight is not known"):
        loaded(tmp_path)


def test_the_matrix_that_expands_latents_is_checked_like_any(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, VARIANTS["deepseek-v3-dense"])
    name, file = "model.layers.1.self_attn.kv_b_proj.weight", tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, name: tensors[name][:-1]}, file)
    with pytest.raises(WeightError, match=r"kv_b_proj\.weight \[127, 32\] \(expected \[128, 32\]\)"):
        loaded(tmp_path)


FUSED = "model.layers.1.mlp.experts.gate_up_proj"
EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"


@pytest.mark.parametrize("variant", ["qwen3-moe-some-plain", "mixtral", "minimax-m2", "ernie-moe", "granite-moe-shared"])
def test_experts_may_be_one_tensor_each_or_all_in_one(variant: str, tmp_path: Path) -> None:
    split, fused = tmp_path / "split", tmp_path / "fused"
    family = (VARIANTS | FAMILIES)[variant]
    write_checkpoint(split, family)
    write_checkpoint(fused, family, save_original_format=False)
    names = {name for name in load_file(fused / "model.safetensors") if ".experts." in name}
    assert names and all(name.endswith((".experts.gate_up_proj", ".experts.down_proj")) for name in names)
    assert not names & load_file(split / "model.safetensors").keys()
    assert torch.equal(loaded(split), loaded(fused))


@pytest.mark.parametrize("fused", [False, True])
def test_progress_counts_every_byte_of_experts(fused: bool, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, VARIANTS["qwen3-moe"], save_original_format=not fused)
    seen: list[tuple[int, int]] = []
    load_weights(empty_model(tmp_path), tmp_path, lambda done, total: seen.append((done, total)))
    size = sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
    assert {total for _, total in seen} == {size} and seen[-1][0] == size


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(EXPERT), [EXPERT, "is missing"]),
        (lambda t: t.update({EXPERT: torch.zeros(64, 48)}), [EXPERT, "[64, 48]", "[48, 64]", "wrong shape"]),
        (lambda t: t.update({EXPERT.replace("5", "8"): torch.zeros(48, 64)}), ["experts.8", "not known"]),
        (lambda t: t.pop("model.layers.0.mlp.gate.weight"), ["layers.0.mlp.gate.weight", "is missing"]),
    ],
)
def test_a_wrong_expert_is_named(change: Callable[[Tensors], object], words: list[str], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, VARIANTS["qwen3-moe"])
    assert_refused(tmp_path, change, words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(FUSED), ["layers.1.mlp.experts.0.gate_proj.weight", "and 11 more", "is missing"]),
        (lambda t: t.update({FUSED: torch.zeros(7, 96, 64)}), [f"{FUSED} [7, 96, 64] (expected [8, 96, 64])", "wrong shape"]),
        (lambda t: t.update({FUSED: torch.zeros(8, 96, 64, dtype=torch.int8)}), [f"{FUSED} (I8)", "dtype"]),
    ],
)
def test_a_wrong_tensor_of_all_experts_is_named_once(change: Callable[[Tensors], object], words: list[str], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, VARIANTS["qwen3-moe"], save_original_format=False)
    assert_refused(tmp_path, change, words)


def assert_refused(folder: Path, change: Callable[[Tensors], object], words: list[str]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightError) as caught:
        loaded(folder)
    message = str(caught.value)
    assert all(word in message and message.count(word) == 1 for word in words), message


HEADS: dict[str, Callable[[Tensors], torch.Tensor]] = {
    "the same": lambda tensors: tensors[EMBEDDING].clone(),
    "another": lambda tensors: tensors[EMBEDDING].flip(0),
    "of another dtype": lambda tensors: tensors[EMBEDDING].half(),
    "alone": lambda tensors: tensors.pop(EMBEDDING),
}


@pytest.mark.parametrize(("head", "files"), [*((head, 1) for head in HEADS), ("the same", 2), ("another", 2)])
def test_a_tied_head_that_is_in_the_files_is_read_as_transformers_does(
    head: str, files: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that differs is loaded, whatever config.json says."""
    write_checkpoint(tmp_path, VARIANTS["qwen3-tied"])
    tensors = load_file(tmp_path / "model.safetensors")
    parts = [{HEAD: HEADS[head](tensors)}, tensors]
    if files == 1:
        save_file(parts[0] | parts[1], tmp_path / "model.safetensors")
    else:
        (tmp_path / "model.safetensors").unlink()
        for at, part in enumerate(parts):
            save_file(part, tmp_path / f"{at}.safetensors")
        names = {name: f"{at}.safetensors" for at, part in enumerate(parts) for name in part}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        expected = model(torch.tensor([PROMPT])).logits[0]
    tied_head._log.cache_clear()
    torch.testing.assert_close(loaded(tmp_path), expected, atol=1e-4, rtol=1e-4)
    assert load_model_config(tmp_path).tie_word_embeddings == (head in ("the same", "alone"))
    assert ("lm_head.weight is loaded, too" in caplog.text) == (head in ("another", "of another dtype"))


def test_a_tied_head_that_is_said_to_be_of_exabytes_is_not_looked_for(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, VARIANTS["qwen3-tied"])
    place = {"dtype": "F32", "shape": [1 << 29, 1 << 29], "data_offsets": [0, 1 << 60]}
    header = json.dumps({HEAD: place, EMBEDDING: place}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(WeightError, match=r"model\.safetensors is damaged or cut short: \S+ goes beyond the end of the file"):
        loaded(tmp_path)


def test_a_tied_head_in_pickles_may_not_differ(tmp_path: Path) -> None:
    """Their bytes are not compared before the model is built."""
    write_checkpoint(tmp_path, VARIANTS["qwen3-tied"])
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save({**tensors, HEAD: tensors[EMBEDDING] * 2}, tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightError, match=r"lm_head\.weight differs .* tie_word_embeddings"):
        load_weights(empty_model(tmp_path), tmp_path, pickles=True)


PIXELS = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 28}
PATCHES = {**PIXELS, "patch_size": 14}
QWEN_PIXELS = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4}
QWEN2_PIXELS = {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2, "patch_size": 4}
SECTIONS = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}
LLAMA4_PIXELS = {**PATCHES, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
BETA = {**FAMILIES["ministral3"].changes, "model_type": "ministral3"}
SMALL4 = {**FAMILIES["mistral4"].changes, "model_type": "mistral4"}
LATENTS = {**VARIANTS["deepseek-v3"].changes, "model_type": "deepseek_v3"}
KIMI_PIXELS = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "patch_size": 14}
TEXT_PARTS: dict[str, tuple[type[Any], type[Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (Gemma3ForConditionalGeneration, Gemma3Config, FAMILIES["gemma3"].changes, PATCHES),
    "kimi-k2.5": (Kimi_K25ForConditionalGeneration, Kimi_K25Config, LATENTS, KIMI_PIXELS),
    "llama4": (Llama4ForConditionalGeneration, Llama4Config, FAMILIES["llama4"].changes, LLAMA4_PIXELS),
    "mistral3": (Mistral3ForConditionalGeneration, Mistral3Config, {"model_type": "mistral"}, {**PATCHES, "model_type": "pixtral"}),
    "ministral3": (Mistral3ForConditionalGeneration, Mistral3Config, BETA, {**PATCHES, "model_type": "pixtral"}),
    "mistral4": (Mistral3ForConditionalGeneration, Mistral3Config, SMALL4, {**PATCHES, "model_type": "pixtral"}),
    "qwen2-vl": (Qwen2VLForConditionalGeneration, Qwen2VLConfig, {"rope_parameters": SECTIONS}, QWEN2_PIXELS),
    "qwen2.5-vl": (Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig, {"rope_parameters": SECTIONS}, QWEN_PIXELS),
    "qwen3-vl": (Qwen3VLForConditionalGeneration, Qwen3VLConfig, {"rope_parameters": SECTIONS, "head_dim": 16}, QWEN_PIXELS),
    "qwen3-vl-moe": (Qwen3VLMoeForConditionalGeneration, Qwen3VLMoeConfig, {**EXPERTS, "rope_parameters": SECTIONS}, QWEN_PIXELS),
}


@pytest.mark.parametrize("name", TEXT_PARTS)
def test_the_text_part_of_a_model_with_images(name: str, tmp_path: Path) -> None:
    """As it is published: the text model's config and tensors lie within those of another."""
    make, config, changes, vision = TEXT_PARTS[name]
    model = make(config(text_config=deepcopy({**BASE, **changes}), vision_config=vision)).eval()
    spread(model)
    model.save_pretrained(tmp_path)
    if name == "kimi-k2.5":  # transformers 5.23 writes the text's layers by the name of those of images; its authors do not
        path = tmp_path / "model.safetensors"
        save_file({each.replace("model.blocks.", "model.layers."): tensor for each, tensor in load_file(path).items()}, path)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(loaded(tmp_path), expected, atol=1e-4, rtol=1e-4)
    if name == "qwen3-vl-moe":  # as its authors save experts
        path = tmp_path / "model.safetensors"
        stored = load_file(path).items()
        save_file({each: x.transpose(1, 2).contiguous() if "experts" in each else x for each, x in stored}, path)
        torch.testing.assert_close(loaded(tmp_path), expected, atol=1e-4, rtol=1e-4)


def test_the_text_part_of_gemma_4(tmp_path: Path) -> None:
    """It is published in a model with images; and layers that read another one's cache have keys, which nothing reads."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    text = {**BASE, **FAMILIES["gemma4-inputs"].changes, "pad_token_id": 0}
    config = Gemma4Config(text_config=text, vision_config={**sizes, "intermediate_size": 16, "position_embedding_size": 16})
    model = Gemma4ForConditionalGeneration(config).eval()
    spread(model)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    unused = {f"model.language_model.layers.4.self_attn.{name}.weight": torch.zeros(4, 4) for name in ("k_proj", "v_proj")}
    save_file({**tensors, **unused}, tmp_path / "model.safetensors")
    assert any(name.startswith("model.vision_tower.") for name in tensors)
    torch.testing.assert_close(loaded(tmp_path), expected, atol=1e-4, rtol=1e-4)


def test_the_text_part_of_gemma_4_without_towers(tmp_path: Path) -> None:
    """12B reads images and sound by one matrix each."""
    text = {**BASE, **FAMILIES["gemma4-unified"].changes, "pad_token_id": 0}
    sizes = {"patch_size": 2, "mm_embed_dim": 16, "mm_posemb_size": 8, "output_proj_dims": 16}
    model = Gemma4UnifiedForConditionalGeneration(Gemma4UnifiedConfig(text_config=text, vision_config=sizes)).eval()
    spread(model)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]
    model.save_pretrained(tmp_path)
    assert any("vision" in name for name in load_file(tmp_path / "model.safetensors"))
    torch.testing.assert_close(loaded(tmp_path), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("base", "own_head"), [(False, False), (False, True), (True, True)])
def test_the_text_part_of_qwen3_5(base: bool, own_head: bool, tmp_path: Path) -> None:
    """It is published in a model with images and videos, and that model is saved without its head, too."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4}
    text = {**BASE, **FAMILIES["qwen3.5"].changes, "tie_word_embeddings": not own_head}
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=not own_head)
    model = Qwen3_5ForConditionalGeneration(config).eval()
    spread(model)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]
    (model.model if base else model).save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert any("visual." in name for name in names) and any(name.startswith("language_model.") for name in names) == base
    if not base:
        torch.testing.assert_close(loaded(tmp_path), expected, atol=2e-4, rtol=1e-4)
        return
    assert not load_model_config(tmp_path).has_lm_head
    load_weights(empty_model(tmp_path), tmp_path)


def test_pickled_weights_are_not_opened(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightError, match=r"only as PyTorch pickles .* convert them to safetensors"):
        loaded(folder)


def test_files_of_tensorizer_are_refused_by_name(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.tensors")
    with pytest.raises(WeightError, match=r"only as files of tensorizer .* convert them to safetensors"):
        loaded(folder)


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightError, match=r"holds neither model\.safetensors nor .* A GGUF file is named itself"):
        loaded(folder)


def test_files_without_their_index_are_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(WeightError, match=r"tensors model-00001-of-00002\.safetensors should hold; .* the index is needed"):
        loaded(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf"])
def test_a_pointer_that_a_clone_without_git_lfs_has_is_named(name: str, folder: Path) -> None:
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n")
    with pytest.raises(ModelError, match=rf"{name} is a pointer of Git LFS, .* git lfs pull"):
        loaded(folder / name if name.endswith(".gguf") else folder)


def test_a_folder_of_gguf_files_is_no_model(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"holds no config\.json: not a model folder; a GGUF file is named itself"):
        loaded(folder)
    (folder / "model-Q4_0.gguf").touch()
    with pytest.raises(ModelError, match=r"not a model folder; its GGUF files are models: name one of model-Q4_0\.gguf"):
        loaded(folder)


def test_a_file_that_is_cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightError, match=r"model\.safetensors is damaged or cut short: \S+\.weight goes beyond the end"):
        loaded(folder)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"a": (0, 64), "b": (64, 1 << 60)}, "b [4, 4] of F32 is not of 1152921504606846912 bytes"),
        ({"a": (0, 64), "b": (1 << 60, (1 << 60) + 64)}, "b goes beyond the end of the file"),
        ({"a": (1 << 60, (1 << 60) + 64), "b": (64, 128)}, "a goes beyond the end of the file"),
        ({"a": (0, 64), "b": (32, 96)}, "a and b overlap"),
        ({"a": (64, 128), "b": (64, 128)}, "a and b overlap"),
        ({"a": (0, 64), "b": (80, 144)}, "b lies behind bytes of no tensor"),
        ({"a": (0, 64), "b": (128, 64)}, "b [4, 4] of F32 is not of -64 bytes"),
        ({"a": (0, 64), "b": "all"}, "Error while deserializing header"),
        ({"a": (0, 64), "b": ("?", 64)}, "Error while deserializing header"),
    ],
)
def test_a_tensor_that_does_not_lie_where_it_can_is_named(places: dict[str, Any], message: str, folder: Path) -> None:
    header = json.dumps({name: {"dtype": "F32", "shape": [4, 4], "data_offsets": at} for name, at in places.items()}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(144))
    with pytest.raises(WeightError, match=re.escape(f"model.safetensors is damaged or cut short: {message}")):
        loaded(folder)


def test_a_tensor_of_an_unknown_dtype_is_named(folder: Path) -> None:
    header = b'{"a": {"dtype": "F3", "shape": [4], "data_offsets": [0, 8]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(WeightError, match=r"model\.safetensors is damaged or cut short: a has the unknown dtype F3"):
        loaded(folder)


def test_a_header_of_2_60_bytes_is_named_before_memory_is_taken(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + bytes(1000))
    with pytest.raises(
        WeightError, match=rf"model\.safetensors is .*: the header is said to have {1 << 60} bytes, and the file has 1000"
    ):
        loaded(folder)


def test_an_empty_file_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(WeightError, match=r"model\.safetensors is empty; download it again"):
        loaded(folder)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ('{"weight_map": {"a": "model-00001.safetensors"}}', r"names model-00001\.safetensors, which"),
        ('{"weight_map": {"a": "../model-00001.safetensors"}}', r"names model-00001\.safetensors, which"),
        ('{"weight_map": ["a"]}', "cannot be read"),
        ("{", "cannot be read"),
        ("{}", "weight_map"),
    ],
)
def test_a_bad_index(index: str, words: str, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightError, match=words):
        loaded(folder)


def test_dummy_weights_depend_on_the_seed_alone(folder: Path) -> None:
    def dummy(seed: int) -> torch.Tensor:
        model = empty_model(folder)
        load_dummy(model, seed)
        return logits(model)

    assert torch.equal(dummy(1), dummy(1))
    assert not torch.equal(dummy(1), dummy(2))


@pytest.mark.parametrize("variant", ["qwen2", "deepseek-v3-dense"])
def test_dummy_weights_give_varied_output(variant: str, tmp_path: Path) -> None:
    """Checks that outputs vary: in tests of speed, one token repeated for ever would hide the cost of sampling."""
    write_checkpoint(tmp_path, VARIANTS[variant])
    edit_json(tmp_path / "config.json", {"tie_word_embeddings": True})
    model = empty_model(tmp_path)
    load_dummy(model, 0)
    driver = PagedDriver(model, torch.float32, block_size=8)
    first = int(driver.run([(0, PROMPT)])[0][-1].argmax())
    assert len(set(driver.greedy(first, 40))) > 10


def test_reads_an_index_with_its_metadata(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, VARIANTS["llama2"], max_shard_size="100KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert "metadata" in index
    assert loaded(tmp_path).isfinite().all()
