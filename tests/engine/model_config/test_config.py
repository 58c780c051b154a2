"""Reading config.json: what each family's fields mean, and that a bad field is named.

The file is long because each field has its cases here, side by side; none of them shares more than a small config.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starling_engine.args import EngineArgs
from starling_engine.errors import ModelError, UnsupportedModel
from starling_engine.frontend.resolve import resolve
from starling_engine.kv.layer_specs import kv_specs
from starling_engine.kv.spec import KVSpec, WindowSpec
from starling_engine.model_config.config import ModelConfig, load_model_config, parse_model_config
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.moe import ClampedSwiglu, MoeConfig, Routing, checked
from starling_engine.model_config.quantization import WeightScheme
from starling_engine.model_config.registry import OTHER_NAMES
from starling_engine.model_config.rope import LinearScaling, Llama3Scaling, YarnScaling
from starling_engine.model_config.traits import Traits

SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}

SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}


KV_ONLY = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME}


def weights(**scheme: object) -> dict[str, Any]:
    """A config of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": scheme}
    return {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}}


def parse(generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    return parse_model_config(Fields({**SMALL, **changes}, "config.json"), Fields(generation or {}, "generation_config.json"))


def of(architecture: str, **changes: Any) -> ModelConfig:
    return parse(architectures=[architecture], **changes)


def test_defaults_are_those_of_transformers() -> None:
    config = parse()
    assert (config.head_dim, config.rms_eps, config.ropes[0].theta, config.dtype) == (16, 1e-6, 10000.0, "float32")
    assert config.windows == (0, 0, 0, 0)
    assert config.traits == Traits() and not config.tie_word_embeddings
    assert config.eos_token_ids == () and config.bos_token_id is None and config.generation_defaults == {}


def test_without_kv_heads_every_head_has_its_own() -> None:
    assert parse(num_key_value_heads=None).num_kv_heads == 4


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, (0, 0, 0, 0)),
        ("MistralForCausalLM", {}, (0, 0, 0, 0)),
        ("MistralForCausalLM", {"sliding_window": 8}, (8, 8, 8, 8)),
        (
            "MistralForCausalLM",
            {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 2},
            (0, 8, 0, 8),
        ),
        ("Qwen2ForCausalLM", {"sliding_window": 8}, (0, 0, 0, 0)),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, (0, 0, 0, 8)),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": True}, (0, 0, 0, 0)),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 2}, (0, 0, 4096, 4096)),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
            },
            (8, 0, 0, 8),
        ),
    ],
)
def test_windows(architecture: str, changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert of(architecture, **changes).windows == windows


def test_family_traits() -> None:
    qwen2, qwen3 = of("Qwen2ForCausalLM"), of("Qwen3ForCausalLM")
    assert (qwen2.traits.qkv_bias, qwen2.traits.o_bias, qwen2.traits.qk_norm, qwen2.head_dim) == (True, False, None, 16)
    assert (qwen3.traits.qkv_bias, qwen3.traits.o_bias, qwen3.traits.qk_norm, qwen3.head_dim) == (False, False, "head", 128)
    llama = parse(attention_bias=True, mlp_bias=True, head_dim=32)
    assert (llama.traits.qkv_bias, llama.traits.o_bias, llama.traits.mlp_bias, llama.head_dim) == (True, True, True, 32)


@pytest.mark.parametrize("changes", [{"hidden_act": "gelu"}, {"hidden_act": "gelu", "hidden_activation": None}, {}])
def test_gelu_of_gemma_1_is_the_approximation_that_it_was_trained_with(changes: dict[str, Any]) -> None:
    assert of("GemmaForCausalLM", **changes).hidden_act == "gelu_pytorch_tanh"


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    ("fields", "scaling", "max_position"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4}}, LinearScaling(factor=4.0), 8192),
        (
            {"rope_parameters": {"rope_type": "llama3", **LLAMA3}},
            Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=512),
            2048,
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}},
            YarnScaling(factor=4.0, original_max_position=2048),
            8192,
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}},
            YarnScaling(factor=4.0, original_max_position=512),
            2048,
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 256, "truncate": False}},
            YarnScaling(factor=8.0, original_max_position=256, truncate=False),
            2048,
        ),
        ({"rope_scaling": None, "rope_parameters": None}, None, 2048),
        ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}, None, 2048),
    ],
)
def test_rope_in_both_ways_of_writing(fields: dict[str, Any], scaling: object, max_position: int) -> None:
    config = parse(**fields)
    assert config.ropes[0].scaling == scaling
    assert config.max_position == max_position


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("CohereForCausalLM", {"model_max_length": 131072}, 131072),
        ("CohereForCausalLM", {"model_max_length": None}, 2048),
        ("Cohere2ForCausalLM", {"model_max_length": 131072}, 131072),
        ("LlamaForCausalLM", {"model_max_length": 131072}, 2048),
    ],
)
def test_the_length_of_command_r_has_a_field_of_its_own(architecture: str, changes: dict[str, Any], expected: int) -> None:
    assert of(architecture, **changes).max_position == expected


def test_theta_beside_or_inside_the_scaling() -> None:
    assert parse(rope_theta=5e5).ropes[0].theta == 5e5
    assert parse(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2}).ropes[0].theta == 5e5
    assert parse(rope_parameters={"rope_type": "default", "rope_theta": 1e6}).ropes[0].theta == 1e6


QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
PHI3: dict[str, Any] = {"architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": 512}
GPT_OSS: dict[str, Any] = {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
MIXTRAL: dict[str, Any] = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}


def test_a_dense_model_has_no_experts() -> None:
    assert of("Qwen3ForCausalLM", num_experts=8).moe is None
    assert parse(**QWEN3_MOE, mlp_only_layers=[0, 1, 2, 3]).moe is None


@pytest.mark.parametrize(
    ("changes", "moe"),
    [
        (QWEN3_MOE, MoeConfig(layers=(0, 1, 2, 3), intermediate_size=32, routing=Routing(num_experts=8, top_k=2))),
        (
            {**QWEN3_MOE, "num_experts": None, "num_local_experts": 6, "norm_topk_prob": True, "decoder_sparse_step": 2},
            MoeConfig(layers=(1, 3), intermediate_size=32, routing=Routing(num_experts=6, top_k=2, renormalize=True)),
        ),
        (
            {**QWEN3_MOE, "mlp_only_layers": [3, 1]},
            MoeConfig(layers=(0, 2), intermediate_size=32, routing=Routing(num_experts=8, top_k=2)),
        ),
        (
            GPT_OSS,
            MoeConfig(
                layers=(0, 1, 2, 3),
                intermediate_size=128,
                routing=Routing(num_experts=4, top_k=2, renormalize=True),
                bias=True,
                gate=ClampedSwiglu(alpha=1.702, limit=7.0),
            ),
        ),
        (
            MIXTRAL,
            MoeConfig(layers=(0, 1, 2, 3), intermediate_size=128, routing=Routing(num_experts=4, top_k=2, renormalize=True)),
        ),
    ],
)
def test_experts(changes: dict[str, Any], moe: MoeConfig) -> None:
    assert parse(**changes).moe == moe


def test_gpt_oss_has_sinks_biases_and_every_second_layer_slides() -> None:
    config = parse(**GPT_OSS, swiglu_limit=3.0)
    assert config.traits.attention_sinks and config.traits.qkv_bias and config.traits.o_bias
    assert (config.windows, config.ropes[0].theta, config.head_dim) == ((128, 0, 128, 0), 150000.0, 64)
    assert config.moe is not None and config.moe.gate == ClampedSwiglu(alpha=1.702, limit=3.0)


def test_mixtral_has_defaults_of_its_own() -> None:
    config = parse(**MIXTRAL, sliding_window=8)
    assert (config.ropes[0].theta, config.rms_eps, config.windows) == (1e6, 1e-5, (8, 8, 8, 8))


def test_qwen3_moe_slides_in_all_layers_or_none() -> None:
    assert parse(**QWEN3_MOE, sliding_window=8, max_window_layers=2).windows == (0, 0, 0, 0)
    config = parse(**QWEN3_MOE, sliding_window=8, max_window_layers=2, use_sliding_window=True)
    assert (config.windows, config.traits.qk_norm, config.head_dim) == ((8, 8, 8, 8), "head", 16)


SOME_GROUPS = Routing(num_experts=8, top_k=3, num_groups=4, top_groups=2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"num_groups": 3}, ["n_group", "divide", "(8)"]),
        ({"top_groups": 5}, ["topk_group", "n_group (4)"]),
        ({"top_groups": 1}, ["num_experts_per_tok", "at most 2"]),
        ({"num_groups": 8, "group_score": "best two"}, ["n_group", "at least 2"]),
        ({"num_groups": 1, "top_groups": 1, "top_k": 9}, ["num_experts_per_tok", "at most 8"]),
    ],
)
def test_a_routing_that_cannot_be_names_its_field(changes: dict[str, Any], words: list[str] | None) -> None:
    routing = replace(SOME_GROUPS, **changes)
    fields = Fields({"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}, "config.json")
    if words is None:
        assert checked(fields, routing) is routing
        return
    with pytest.raises(ModelError) as caught:
        checked(fields, routing)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("tokenizer", "added", "ends"),
    [
        ({"eos_token": "<|im_end|>", "added_tokens_decoder": {"9": {"content": "<|im_end|>"}}}, [], (7, 9)),
        ({"eos_token": {"content": "<|im_end|>"}}, [{"id": 3, "content": "a"}, {"id": 9, "content": "<|im_end|>"}], (7, 9)),
        ({"eos_token": "</s>", "added_tokens_decoder": {"7": {"content": "</s>"}}}, [], (7,)),
        ({"eos_token": "</s>"}, [{"id": 600, "content": "</s>"}], (7,)),
        ({"eos_token": "</s>"}, [], (7,)),
        ({"eos_token": None}, [], (7,)),
        ({"eos_token": "a", "added_tokens_decoder": [1]}, [], (7,)),
        (None, [], (7,)),
    ],
)
def test_the_tokenizers_end_is_one_too(tokenizer: object, added: list[object], ends: tuple[int, ...], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"eos_token_id": 7}))
    if tokenizer is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    vocabulary = {'"added_tokens": [{"id": 8, "content": "<|im_end|>"}]': 1}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": added, "model": {"vocab": vocabulary}}))
    assert load_model_config(tmp_path).eos_token_ids == ends


def test_the_end_is_that_of_the_tokenizer_which_is_named(tmp_path: Path) -> None:
    """Show that ids of the model's own tokenizer do not end outputs of another, where they are text."""
    for name, end in (("model", 8), ("tokenizer", 9)):
        (tmp_path / name).mkdir()
        named = {"eos_token": "<end>", "added_tokens_decoder": {str(end): {"content": "<end>"}}}
        (tmp_path / name / "tokenizer_config.json").write_text(json.dumps(named))
    (tmp_path / "model" / "config.json").write_text(json.dumps(SMALL | {"eos_token_id": 7}))
    args = EngineArgs(model=str(tmp_path / "model"), tokenizer=str(tmp_path / "tokenizer"))
    _, model, config = resolve(args)
    assert model.eos_token_ids == config.scheduler.eos_token_ids == (7, 9)


@pytest.mark.parametrize(
    ("written", "scaling", "tokenizer", "expected"),
    [
        (16384, {"type": "linear", "factor": 4}, {"model_max_length": 16384}, 16384),  # DeepSeek Coder
        (4096, {"type": "linear", "factor": 4}, {"model_max_length": 16384}, 16384),  # Vicuna 16k
        (4096, {"type": "linear", "factor": 4}, {"model_max_length": 8192}, 8192),
        (4096, {"type": "linear", "factor": 4}, {"model_max_length": 2048}, 16384),
        (4096, {"type": "linear", "factor": 4}, {"model_max_length": int(1e30)}, 16384),
        (4096, {"type": "linear", "factor": 4}, {"model_max_length": "4096"}, 16384),
        (4096, {"type": "linear", "factor": 4}, None, 16384),
        (16384, {"type": "linear", "factor": 4, "original_max_position_embeddings": 4096}, {"model_max_length": 65536}, 16384),
        (4096, {"type": "linear", "factor": 1}, {"model_max_length": 2048}, 4096),
        (4096, {"type": "dynamic", "factor": 4}, {"model_max_length": 2048}, 4096),
        (4096, None, {"model_max_length": 2048}, 4096),
    ],
)
def test_the_length_that_linear_scaling_leaves(
    written: int, scaling: dict[str, Any] | None, tokenizer: dict[str, Any] | None, expected: int, tmp_path: Path
) -> None:
    """Some configs have the length before scaling, some the one after it: the tokenizer's tells which."""
    config = SMALL | {"max_position_embeddings": written, "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert load_model_config(tmp_path).max_position == expected


def test_generation_config_adds_stop_tokens_and_defaults() -> None:
    config = parse({"eos_token_id": [9, 7], "temperature": 0.6, "top_k": 20, "do_sample": True}, eos_token_id=7, bos_token_id=1)
    assert config.eos_token_ids == (7, 9)
    assert config.bos_token_id == 1
    assert config.generation_defaults == {"temperature": 0.6, "top_k": 20}
    assert parse({"max_new_tokens": 12}).generation_defaults == {"max_tokens": 12}
    assert isinstance(config.generation_defaults["top_k"], int)


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.0), ("min_p", 2.0), ("repetition_penalty", 0), ("temperature", 1000.0)])
def test_a_default_for_which_each_request_would_be_refused_is_named(name: str, value: float) -> None:
    with pytest.raises(ModelError, match=rf"generation_config\.json: {name} must be in"):
        parse({name: value})


@pytest.mark.parametrize(("field", "name"), [("dtype", "bfloat16"), ("torch_dtype", "torch.float16")])
def test_dtype_in_both_ways_of_writing(field: str, name: str) -> None:
    assert parse(**{field: name}).dtype == name.removeprefix("torch.")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, ["hidden_size is missing"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ({"hidden_size": True}, ["hidden_size", "integer"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "at least 1"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers", "at most 10000"]),
        ({"num_attention_heads": 0}, ["num_attention_heads", "at least 1"]),
        ({"num_key_value_heads": 0}, ["num_key_value_heads", "at least 1"]),
        ({"hidden_size": -64}, ["hidden_size", "at least 1", "-64"]),
        ({"intermediate_size": -1}, ["intermediate_size", "at least 1"]),
        ({"vocab_size": "512"}, ["vocab_size", "integer", "'512'"]),
        ({"vocab_size": 512.5}, ["vocab_size", "integer", "512.5"]),
        ({"hidden_size": 10**9}, ["hidden_size", "at most 1048576"]),
        ({"vocab_size": 10**9}, ["vocab_size", "at most 16777216"]),
        ({"head_dim": 10**9}, ["head_dim", "at most 1048576"]),
        ({"rms_norm_eps": 10**400}, ["rms_norm_eps", "at most 1e+30"]),
        ({"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 0}, ["query_pre_attn_scalar", "at least 1e-06"]),
        ({"num_attention_heads": 1 << 30, "head_dim": 16}, ["num_attention_heads times head_dim (16)", "at most 1048576"]),
        ({"max_position_embeddings": 10**12}, ["max_position_embeddings", "at most 16777216 tokens"]),
        ({"rope_scaling": {"type": "linear", "factor": 1e6}}, ["max_position_embeddings", "at most 16777216 tokens", "scaling"]),
        ({"architectures": ["CohereForCausalLM"], "model_max_length": 10**30}, ["model_max_length", "at most 16777216 tokens"]),
        ({**QWEN3_MOE, "num_experts": 10**9}, ["num_experts", "at most 10000"]),
        (
            {**QWEN3_MOE, "num_experts": 10_000, "num_hidden_layers": 21},
            ["num_hidden_layers must leave at most 200000 experts in all", "21 layers have 10000 each"],
        ),
        ({**PHI3, "partial_rotary_factor": 1.5}, ["partial_rotary_factor", "at most 1", "1.5"]),
        ({**PHI3, "partial_rotary_factor": 0.2}, ["partial_rotary_factor", "16 elements", "got 3"]),
        ({**PHI3, "rope_scaling": {**LONGROPE, "long_factor": [1.0]}}, ["long_factor", "8 numbers", "got 1"]),
        (
            {**PHI3, "original_max_position_embeddings": 1, "rope_scaling": LONGROPE},
            ["original_max_position_embeddings", "at least 2", "got 1"],
        ),
        ({**PHI3, "rope_scaling": {**LONGROPE, "short_factor": [0]}}, ["short_factor", "numbers above 0"]),
        ({"architectures": ["CohereForCausalLM"], "logit_scale": 0}, ["logit_scale", "above 0"]),
        ({"architectures": ["GraniteForCausalLM"], "logits_scaling": 0}, ["logits_scaling", "above 0"]),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, ["no_rope_layers", "(4)"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads (4)", "num_key_value_heads (3)"]),
        ({"hidden_size": 66}, ["hidden_size (66)", "num_attention_heads (4)"]),
        ({"head_dim": 15}, ["head_dim", "even", "15"]),
        ({"rms_norm_eps": "small"}, ["rms_norm_eps"]),
        ({"rms_norm_eps": -1}, ["rms_norm_eps"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings"]),
        ({"eos_token_id": ["</s>"]}, ["eos_token_id"]),
        ({"bos_token_id": -1}, ["bos_token_id"]),
        ({"rope_theta": 0}, ["rope_theta"]),
        ({"rope_scaling": [1]}, ["rope_scaling", "object"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling: factor is missing"]),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": None}}, ["low_freq_factor"]),
        ({"architectures": "LlamaForCausalLM"}, ["architectures", "list"]),
        ({**QWEN3_MOE, "num_experts_per_tok": 9}, ["num_experts_per_tok", "at most 8"]),
        ({**QWEN3_MOE, "num_experts": None}, ["num_experts is missing"]),
        ({**QWEN3_MOE, "moe_intermediate_size": None}, ["moe_intermediate_size is missing"]),
        ({**QWEN3_MOE, "mlp_only_layers": [-1]}, ["mlp_only_layers", "integers"]),
        ({**QWEN3_MOE, "decoder_sparse_step": 0}, ["decoder_sparse_step", "at least 1"]),
        ({**MIXTRAL, "num_local_experts": None}, ["num_local_experts is missing"]),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 8, "layer_types": ["full_attention"]},
            ["layer_types", "(4)"],
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["sliding_attention"] * 4},
            ["sliding_window", "layer_types"],
        ),
    ],
)
def test_a_bad_field_is_named(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        parse(**changes)
    assert str(caught.value).startswith("config.json")
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["BloomForCausalLM"]}, ["BloomForCausalLM", "LlamaForCausalLM"]),
        ({"architectures": ["Gemma3nForCausalLM"]}, ["the nearest is Gemma3ForCausalLM", "docs/models.md"]),
        ({"architectures": ["CohereForCausalLM"], "use_qk_norm": True}, ["use_qk_norm", "false"]),
        ({"architectures": ["Gemma2Model"], "use_bidirectional_attention": True}, ["in both directions", "soft caps"]),
        ({"architectures": None}, ["architectures", "none"]),
        ({"hidden_act": "relu"}, ["hidden_act", "'relu'", "silu, gelu, gelu_pytorch_tanh, relu2"]),
        ({"architectures": ["Gemma2ForCausalLM"], "hidden_act": "gelu"}, ["hidden_act 'gelu'", "silu, gelu_pytorch_tanh"]),
        ({**MIXTRAL, "hidden_act": "gelu_pytorch_tanh"}, ["'gelu_pytorch_tanh'", "for experts; supported: silu"]),
        ({"dtype": "float8_e4m3fn"}, ["dtype", "float8_e4m3fn"]),
        ({"rope_scaling": {"type": "xpos", "factor": 2.0}}, ["rope_type", "'xpos'", "yarn"]),
        ({"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}}, ["rope_type 'dynamic'", "without alpha"]),
        ({"architectures": ["PhiForCausalLM"], "qk_layernorm": True}, ["qk_layernorm", "false"]),
        ({"architectures": ["StableLmForCausalLM"], "qk_layernorm": True}, ["qk_layernorm", "false"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e6}}},
            ["rope_parameters", "layer types"],
        ),
        ({"quantization_config": {"quant_method": "hqq"}}, ["quantization_config: quant_method 'hqq'", "supported: gptq, awq"]),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv"}}, ["version 'gemv'", "gemm"]),
        ({"quantization_config": {"quant_method": "gptq", "bits": 5}}, ["bits 5", "2, 3, 4, 8"]),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}}, ["'marlin'", "gptq_v2"]),
        ({"quantization_config": {"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}}, ["mx_fp", "int"]),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}}, ["quant_algo 'w4a8_awq'", "nvfp4"]),
        (weights(num_bits=6, type="float"), ["group_0: weights: num_bits 6", "4, 8"]),
        (weights(num_bits=4, strategy="token"), ["group_0: weights: strategy 'token'", "tensor, channel, group"]),
        ({"quantization_config": {**KV_ONLY, "format": "marlin-24"}}, ["format 'marlin-24'", "pack-quantized"]),
        ({"quantization_config": {**KV_ONLY, "sparsity_config": {"format": "sparse-24-bitmask"}}}, ["sparse-24-bitmask", "dense"]),
        (
            {"quantization_config": {**KV_ONLY, "kv_cache_scheme": {**SCHEME, "strategy": "attn_head"}}},
            ["kv_cache_scheme", "tensor"],
        ),
        ({"quantization_config": {**KV_ONLY, "kv_cache_scheme": {**SCHEME, "type": "int"}}}, ["kv_cache_scheme", "float"]),
        (
            {"quantization_config": {**KV_ONLY, "kv_cache_scheme": {**SCHEME, "symmetric": False}}},
            ["config.json: quantization_config: kv_cache_scheme: symmetric", "true"],
        ),
        (
            {"quantization_config": {**KV_ONLY, "transform_config": {"config_groups": {"R3": {"type": "hadamard"}}}}},
            ["config.json: quantization_config: transform_config"],
        ),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "rotation": "hadamard"}}, ["rotation (", "at run time"]),
        *(
            ({"quantization_config": {"quant_method": "auto-round", "bits": 4, name: {"hadamard_type": "quarot"}}}, [f"{name} ("])
            for name in ("rotation_config", "spinquant_config", "transform_config")
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["linear_attention"] * 4},
            ["layer_types", "linear_attention"],
        ),
    ],
)
def test_an_unknown_feature_is_named_with_what_is_known(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        parse(**changes)
    assert all(word in str(caught.value) for word in words), caught.value


def test_scales_of_a_cache_alone_are_no_quantized_weights() -> None:
    assert parse(quantization_config=KV_ONLY) == parse()
    assert parse(quantization_config={**KV_ONLY, "transform_config": {}}) == parse()
    for of_modelopt in ({"quant_method": "modelopt"}, {"quant_algo": None}):
        assert parse(quantization_config={**of_modelopt, "kv_cache_quant_algo": "FP8"}) == parse()


@pytest.mark.parametrize("config", [{}, {"quant_algo": None, "kv_cache_quant_algo": None}])
def test_a_quantization_config_that_says_nothing_is_none(config: dict[str, Any], tmp_path: Path) -> None:
    assert parse(quantization_config=config) == parse()
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "quantization_config": config}))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    beside = load_model_config(tmp_path).quantization
    assert (beside is None) == bool(config)


@pytest.mark.parametrize(
    "fields", [("quantization_config",), ("compression_config",), ("quantization_config", "compression_config")]
)
def test_what_adapters_leave_behind_of_bitsandbytes_is_passed_over(fields: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **{key: {"quant_method": "bitsandbytes"} for key in fields}}))
    names = {"weight_map": {"model.layers.0.mlp.up_proj.weight": "model.safetensors"}}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps(names))
    assert load_model_config(tmp_path).quantization is None
    names["weight_map"]["model.layers.0.mlp.up_proj.weight.absmax"] = "model.safetensors"
    index.write_text(json.dumps(names))
    assert load_model_config(tmp_path).quantization is not None


def test_a_dense_module_takes_what_comes_before_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    kinds = {"": "Transformer", "1": "Pooling", "2": "Dense", "3": "Dense"}
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for path, kind in kinds.items()]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    for name, fields in (("1", {}), ("2", {"in_features": 64, "out_features": 8}), ("3", {"in_features": 8, "out_features": 4})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(fields))
    assert load_model_config(tmp_path).vector_size == 4
    (tmp_path / "3" / "config.json").write_text(json.dumps({"in_features": 64, "out_features": 4}))
    with pytest.raises(ModelError, match=r"3/config\.json: in_features must be 8, .* got 64"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "holds no config.json"),
        ("{", "cannot be read"),
        ("[1]", "JSON object"),
        ("[" * 100_000, "config.json cannot be read"),
    ],
)
def test_a_folder_without_a_readable_config(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=words):
        load_model_config(tmp_path)


def test_the_folder_may_lack_a_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    assert load_model_config(tmp_path) == parse()


def test_each_layer_says_what_it_caches() -> None:
    config = of("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=8, max_window_layers=3)
    full, window = KVSpec(16, 2, 16, 2), WindowSpec(16, 2, 16, 2, 8)
    assert kv_specs(config, 16, "bfloat16") == {0: full, 1: full, 2: full, 3: window}


def test_a_config_is_read_and_memory_planned_without_torch() -> None:
    modules = "starling_engine.model_config.config, starling_engine.kv.layer_specs, starling_engine.ledger"
    code = f"import sys; import {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def schemes(config: dict[str, Any], *modules: str) -> list[WeightScheme | None]:
    quantization = parse(quantization_config=config).quantization
    assert quantization is not None
    return [quantization.scheme_of(module) for module in modules]


def test_a_module_has_the_scheme_of_the_first_rule_that_names_it() -> None:
    four, eight = {"num_bits": 4, "type": "int", "symmetric": False}, {"num_bits": 8, "type": "int"}
    groups = {
        "group_0": {"targets": [r"re:.*\.down_proj$", "model.layers.0.mlp.up_proj"], "weights": eight},
        "group_1": {"targets": ["Linear"], "weights": four},
        "group_2": {"targets": ["Linear"], "weights": None, "input_activations": eight},
        "group_3": {"targets": ["Embedding"], "weights": eight},
    }
    found = schemes(
        {"quant_method": "compressed-tensors", "config_groups": groups},
        *("model.layers.3.mlp.down_proj", "model.layers.0.mlp.up_proj", "model.embed_tokens"),
        *("model.layers.1.mlp.up_proj", "embed_out"),
    )
    assert found == [*[WeightScheme(8)] * 3, *[WeightScheme(4, symmetric=False)] * 2]
    assert parse(compression_config={"quant_method": "compressed-tensors", "config_groups": groups}).quantization is not None
    none = {"group_0": {"targets": ["re:.*self_attn$"], "weights": None}}
    assert parse(quantization_config={"quant_method": "compressed-tensors", "config_groups": none}).quantization is None
    only = {"group_0": groups["group_0"]}
    assert schemes({"quant_method": "compressed-tensors", "config_groups": only}, "model.layers.1.mlp.up_proj") == [None]


def test_gptq_and_auto_round_may_have_modules_of_their_own() -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "dynamic": {r"+:.*\.0\..*": {"bits": 8}, r"-:.*\.1\..*": {}}}
    assert schemes(gptq, "layers.0.up", "layers.2.up") == [WeightScheme(8, 128, zero_shift=1), WeightScheme(4, 128, zero_shift=1)]
    rounded = {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:gptqmodel", "sym": False}
    rounded["extra_config"] = {"lm_head": {"bits": 8}, r".*\.0\..*": {"sym": True}}
    rounded["group_size"] = -1
    expected = [WeightScheme(8, symmetric=False), WeightScheme(4), WeightScheme(4, symmetric=False)]
    assert schemes(rounded, "lm_head", "layers.0.up", "layers.1.up") == expected


def rounding_group(strategy: str, inputs: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """Makes a config of compressed-tensors with weights in FP8."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": strategy, **more}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {**group, "input_activations": inputs}}}


FLOATS = {"num_bits": 8, "type": "float"}


@pytest.mark.parametrize(
    ("config", "rounding"),
    [
        (rounding_group("channel", {**FLOATS, "strategy": "token", "dynamic": True}), "token"),
        (rounding_group("tensor", {**FLOATS, "strategy": "tensor", "dynamic": False}), "static"),
        (rounding_group("tensor", {**FLOATS, "strategy": "tensor", "dynamic": True}), "token"),
        (
            rounding_group(
                "block", {**FLOATS, "strategy": "group", "group_size": 128, "dynamic": True}, block_structure=[128, 128]
            ),
            "group",
        ),
        (rounding_group("group", {**FLOATS, "strategy": "group", "group_size": 32, "dynamic": True}, group_size=32), ""),
        (rounding_group("channel", {**FLOATS, "strategy": "channel", "dynamic": False}), ""),
        (rounding_group("channel", {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}), ""),
        (rounding_group("channel", None), ""),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}, "group"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, ""),
        ({"quant_method": "fp8"}, "token"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "static"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "token"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "static"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ""),
        ({"quant_method": "gptq", "bits": 8}, ""),
    ],
)
def test_how_activations_are_rounded_to_fp8(config: dict[str, Any], rounding: str) -> None:
    found = parse(quantization_config=config).quantization
    assert found is not None and found.default is not None
    assert found.default.rounding == rounding


def test_a_bad_field_of_a_quantization_config_is_named() -> None:
    for config, message in (
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:[": {}}}, r"dynamic must hold regular expressions \('\['"),
        ({"quant_method": "gptq"}, "quantization_config: bits is missing"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"up": {"bits": 40}}}, "dynamic: up: bits 40 is not supported"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size must be an integer of at least 1"),
        ({"quant_method": "auto-round", "bits": 4, "sym": False}, "packing_format is missing"),
        (
            weights(num_bits=8, type="float", strategy="block", block_structure=[0, 128])["quantization_config"],
            "block_structure must",
        ),
        (
            weights(num_bits=8, type="float", strategy="block", block_structure="0x128")["quantization_config"],
            "block_structure must",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two integers above 0"),
    ):
        with pytest.raises(ModelError, match=message):
            parse(quantization_config=config)


PATTERNS = (
    r".*mlp\.experts\.\d+\..*",
    r"model\.layers\.(0|1|2)\..*",
    ".*down_proj",
    r"(?:model\.)?layers\.[0-9]+\.mlp",
    r".*self_attn\.(q|k|v)_proj$",
    r"^model\.layers\.(?!0\.)\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj",
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_of_real_checkpoints_are_taken(pattern: str) -> None:
    assert schemes({"quant_method": "gptq", "bits": 4, "dynamic": {f"+:{pattern}": {"bits": 8}}}, "lm_head")
    group = {"targets": [f"re:{pattern}"], "weights": {"num_bits": 8}}
    assert schemes({"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}, "lm_head") == [None]


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(.*)*x$", "repeats in repeats"),
        ("(a|aa)+x$", "alternatives in repeats"),
        ("(a?b?)*x$", "repeats in repeats"),
        ("(?:a{1,9}){1,9}x$", "repeats in repeats"),
        (".*" * 5 + "x$", "at most 4 repeats"),
        (r"\d+" * 9 + "x$", "and 8 with those of digits"),
        ("a" * 2001, "at most 2000 characters"),
        ("(" * 999 + ")" * 999, "recursion"),
    ],
)
def test_patterns_that_could_take_for_ever_are_refused(pattern: str, words: str) -> None:
    name = "a" * 1000
    group = {"targets": [f"re:{pattern}"], "weights": {"num_bits": 8}}
    for config in (
        {"quant_method": "gptq", "bits": 4, "dynamic": {pattern: {"bits": 8}}},
        {"quant_method": "auto-round", "bits": 4, "extra_config": {pattern + "$": {"bits": 8}}},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}},
    ):
        with pytest.raises(ModelError, match=f"must hold regular expressions .*{words}"):
            parse(quantization_config=config)
    four = {"quant_method": "gptq", "bits": 4, "dynamic": {".*.*.*.*x$": {"bits": 8}}}
    assert schemes(four, name) == [WeightScheme(4, 128, zero_shift=1)]


def test_a_module_may_have_an_order_of_its_own() -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "dynamic": {"+:up": {"desc_act": True}}}
    assert schemes(gptq, "up", "down") == [WeightScheme(4, 128, zero_shift=1, ordered=True), WeightScheme(4, 128, zero_shift=1)]


def test_blocks_may_be_a_text() -> None:
    found = weights(num_bits=8, type="float", strategy="block", block_structure="128x64")["quantization_config"]
    assert schemes(found, "up") == [WeightScheme(8, block=(128, 64))]


@pytest.mark.parametrize(("written", "expected"), [(1010000, 262144), (32768, 32768)])
def test_a_model_with_dual_chunk_attention_is_served_within_one_chunk(written: int, expected: int) -> None:
    chunks = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
    config = of("Qwen2ForCausalLM", max_position_embeddings=written, dual_chunk_attention_config=chunks)
    assert config.max_position == expected


def test_other_names_have_one_ending() -> None:
    endings = ("ForCausalLM", "ForConditionalGeneration", "ForSequenceClassification", "ForTokenClassification", "ForMaskedLM")
    endings += ("ForPreTraining", "Model", "ColBERT")
    for name in OTHER_NAMES:
        assert sum(map(name.count, endings)) == 1, name


def test_ernies_first_name_is_that_of_the_same_decoder() -> None:
    assert of("Ernie4_5_ForCausalLM") == of("Ernie4_5ForCausalLM")


def test_quantized_weights_are_computed_in_bfloat16() -> None:
    assert parse(dtype="float16", quantization_config={"quant_method": "awq", "bits": 4}).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        (["Qwen3VLv2ForConditionalGeneration"], "Qwen3VLForConditionalGeneration"),
        (["LlamaForQuestionAnswering"], "LlamaForCausalLM"),
        (["olmo3forcausallm"], "Olmo3ForCausalLM"),
        (["BloomForCausalLM"], None),
        ([], None),
    ],
)
def test_the_nearest_architecture_is_found_by_its_familys_name(asked: list[str], nearest: str | None) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        parse(architectures=asked)
    assert nearest is None or f"; the nearest is {nearest}; supported: " in str(caught.value)
    assert nearest is not None or "the nearest" not in str(caught.value)


def test_gemma_3_as_published_leaves_out_what_transformers_has_by_default() -> None:
    """The config of gemma-3-4b-it, whose longest sequence is the one after scaling."""
    sizes = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text = {**sizes, "model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    fields = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": text}
    config = parse_model_config(Fields(fields, "config.json"), Fields({}, ""))
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.max_position == 131072 and config.tie_word_embeddings and config.eos_token_ids == (1, 106)
    assert config.windows[:6] == (1024,) * 5 + (0,)
