"""What is read of configs as their authors published them. Fields that have no part in it are left out.

Long, since the configs are quoted.
"""

from typing import Any

import pytest
from starling_engine.errors import ModelError
from starling_engine.kv.layer_specs import kv_specs, state_specs
from starling_engine.kv.spec import StatePart, StateSpec
from starling_engine.model_config.config import parse_model_config
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.moe import MoeConfig, Routing
from starling_engine.model_config.rope import Llama3Scaling, LongRopeScaling, YarnScaling
from starling_engine.topology.shard import Shard

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
SLIDING, FULL = "sliding_attention", "full_attention"


def shape(architecture: str, layers: int, hidden: int, width: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }


GEMMA_1_2B = shape("Gemma", 18, 2048, 16384, 8, 1, 256000) | {
    "head_dim": 256,
    "hidden_act": "gelu",
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "eos_token_id": 1,
}
GEMMA_2_2B = shape("Gemma2", 26, 2304, 9216, 8, 4, 256000) | {
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "eos_token_id": 1,
}
GEMMA_3_1B = shape("Gemma3", 26, 1152, 6912, 4, 1, 262144) | {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "rope_theta": 1000000,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "eos_token_id": [1, 106],
}
COMMAND_R = shape("Cohere", 40, 8192, 22528, 64, 64, 256000) | {
    "max_position_embeddings": 8192,
    "model_max_length": 131072,
    "rope_theta": 8000000.0,
    "logit_scale": 0.0625,
    "eos_token_id": 255001,
}
PHI_3_5_MINI = shape("Phi3", 32, 3072, 8192, 32, 32, 32064) | {
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": LONGROPE,
    "sliding_window": 262144,
    "eos_token_id": 32000,
}
PHI_4_MINI = shape("Phi3", 32, 3072, 8192, 24, 8, 200064) | {
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rope_theta": 10000.0,
    "rope_scaling": LONGROPE,
    "sliding_window": 262144,
    "eos_token_id": 199999,
}
GPT_OSS_20B = shape("GptOss", 24, 2880, 2880, 64, 8, 201088) | {
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rope_theta": 150000,
    "rope_scaling": YARN,
    "sliding_window": 128,
    "layer_types": [SLIDING, FULL] * 12,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "eos_token_id": 200002,
}
EXAONE_4_32B = shape("Exaone4", 64, 5120, 27392, 40, 8, 102400) | {
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000,
    "rope_scaling": LLAMA3,
    "sliding_window": 4096,
    "sliding_window_pattern": "LLLG",
    "eos_token_id": 361,
}
EXAONE_4_1B = shape("Exaone4", 30, 2048, 4096, 32, 8, 102400) | {
    "head_dim": 64,
    "max_position_embeddings": 65536,
    "rope_theta": 1000000,
    "rope_scaling": LLAMA3,
    "sliding_window": None,
    "sliding_window_pattern": None,
    "eos_token_id": 361,
}
GLM_4_32B_0414 = shape("Glm4", 61, 6144, 23040, 48, 2, 151552) | {
    "head_dim": 128,
    "attention_bias": False,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "eos_token_id": [151329, 151336, 151338],
}
OLMO_2_7B = shape("Olmo2", 32, 4096, 11008, 32, 32, 100352) | {
    "max_position_embeddings": 4096,
    "rope_theta": 500000,
    "rope_scaling": None,
    "eos_token_id": 100257,
}

FALCON_3_7B = shape("Llama", 28, 3072, 23040, 12, 4, 131072) | {
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rope_theta": 1000042,
    "rope_scaling": None,
    "mlp_bias": False,
    "eos_token_id": 11,
}
STARCODER_2_3B = shape("Starcoder2", 30, 3072, 12288, 24, 2, 49152) | {
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 16384,
    "norm_epsilon": 1e-05,
    "rope_theta": 999999.4420358813,
    "sliding_window": 4096,
    "use_bias": True,
    "eos_token_id": 0,
}
MINITRON_4B = shape("Nemotron", 32, 3072, 9216, 24, 8, 256000) | {
    "head_dim": 128,
    "hidden_act": "relu2",
    "max_position_embeddings": 4096,
    "norm_eps": 1e-05,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "eos_token_id": 3,
}
INTERNLM_3_8B = shape("InternLM3", 48, 4096, 10240, 32, 2, 128512) | {
    "head_dim": 128,
    "bias": False,
    "qkv_bias": False,
    "max_position_embeddings": 32768,
    "rope_theta": 50000000,
    "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"},
    "eos_token_id": 2,
}
PHI_2 = shape("Phi", 32, 2560, 10240, 32, 32, 51200) | {
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "partial_rotary_factor": 0.4,
    "qk_layernorm": False,
    "rope_theta": 10000.0,
    "eos_token_id": 50256,
}
STABLELM_2_1_6B = shape("StableLm", 24, 2048, 5632, 32, 32, 100352) | {
    "hidden_act": "silu",
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 4096,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000,
    "use_qkv_bias": True,
    "eos_token_id": 100257,
}
QWEN_1_5_MOE = shape("Qwen2Moe", 24, 2048, 5632, 16, 16, 151936) | {
    "max_position_embeddings": 8192,
    "rope_theta": 1000000.0,
    "decoder_sparse_step": 1,
    "max_window_layers": 21,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "norm_topk_prob": False,
    "eos_token_id": 151643,
}
GRANITE_3_MOE = shape("GraniteMoe", 32, 1536, 512, 24, 8, 49155) | {
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "logits_scaling": 6.0,
    "residual_multiplier": 0.22,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "num_local_experts": 40,
    "num_experts_per_tok": 8,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
GLM_4_5_AIR = shape("Glm4Moe", 46, 4096, 10944, 96, 8, 151552) | {
    "head_dim": 128,
    "attention_bias": True,
    "max_position_embeddings": 131072,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "use_qk_norm": False,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 1.0,
    "eos_token_id": [151329, 151336, 151338],
}
ERNIE_4_5_03B = shape("Ernie4_5", 18, 1024, 3072, 16, 2, 103424) | {
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
    "eos_token_id": 2,
}
ERNIE_4_5_21B = shape("Ernie4_5_Moe", 28, 2560, 12288, 20, 4, 103424) | {
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 27,
    "moe_layer_interval": 1,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": True,
    "use_bias": False,
    "eos_token_id": 2,
}
ERNIE_ROUTING = Routing(num_experts=64, top_k=6, bias=True, renormalize=True)
MINIMAX_M2 = shape("MiniMaxM2", 62, 3072, 1536, 48, 8, 200064) | {
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "max_position_embeddings": 196608,
    "mtp_transformer_layers": 1,
    "num_mtp_modules": 3,
    "num_experts_per_tok": 8,
    "num_local_experts": 256,
    "qk_norm_type": "per_layer",
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "eos_token_id": 200020,
}
MINIMAX_ROUTING = Routing(num_experts=256, top_k=8, score="sigmoid", bias=True, renormalize=True)
HUNYUAN_A13B = shape("HunYuanMoEV1", 32, 4096, 3072, 32, 8, 128167) | {
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": [3072] * 32,
    "moe_topk": [8] * 32,
    "num_experts": 64,
    "num_shared_expert": [1] * 32,
    "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "type": "dynamic"},
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_cla": False,
    "use_mixed_mlp_moe": True,
    "use_qk_norm": True,
    "eos_token_id": 127960,
}
HUNYUAN_ROUTING = Routing(num_experts=64, top_k=8, renormalize=True)
DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}
QWEN_3_NEXT_80B = shape("Qwen3Next", 48, 2048, 5120, 16, 2, 151936) | {
    **DELTA,
    "head_dim": 256,
    "max_position_embeddings": 262144,
    "partial_rotary_factor": 0.25,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "shared_expert_intermediate_size": 512,
    "eos_token_id": 151645,
}
QWEN_3_5_35B = shape("Qwen3_5Moe", 40, 2048, 0, 16, 2, 248320) | {
    **DELTA,
    "intermediate_size": None,
    "attn_output_gate": True,
    "head_dim": 256,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 10,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "moe_intermediate_size": 512,
    "mtp_num_hidden_layers": 1,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "shared_expert_intermediate_size": 512,
    "eos_token_id": 248044,
}
GPT_2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "layer_norm_epsilon": 1e-05,
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
OPT_125M = {
    "_remove_final_layer_norm": False,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "bos_token_id": 2,
    "do_layer_norm_before": True,
    "eos_token_id": 2,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "max_position_embeddings": 2048,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "torch_dtype": "float16",
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}
OLMOE_1B_7B = shape("Olmoe", 16, 2048, 1024, 16, 16, 50304) | {
    "clip_qkv": None,
    "max_position_embeddings": 4096,
    "norm_topk_prob": False,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "rope_theta": 10000.0,
    "eos_token_id": 50279,
}
SIGMOID = Routing(num_experts=128, top_k=8, score="sigmoid", bias=True, group_score="best two", renormalize=True)


@pytest.mark.parametrize(
    ("config", "layers", "thetas", "scaling", "max_position", "rotary_dim", "eos"),
    [
        pytest.param(GEMMA_1_2B, [(0, 0)], [1e4], None, 8192, 256, (1,), id="gemma-2b"),
        pytest.param(GEMMA_2_2B, [(4096, 0), (0, 0)], [1e4], None, 8192, 256, (1,), id="gemma-2-2b"),
        pytest.param(GEMMA_3_1B, [(512, 1)] * 5 + [(0, 0)], [1e6, 1e4], None, 32768, 256, (1, 106), id="gemma-3-1b"),
        pytest.param(COMMAND_R, [(0, 0)], [8e6], None, 131072, 128, (255001,), id="command-r"),
        pytest.param(PHI_3_5_MINI, [(0, 0)], [1e4], LongRopeScaling, 131072, 96, (32000,), id="phi-3.5-mini"),
        pytest.param(PHI_4_MINI, [(0, 0)], [1e4], LongRopeScaling, 131072, 96, (199999,), id="phi-4-mini"),
        pytest.param(GPT_OSS_20B, [(128, 0), (0, 0)], [150000.0], YarnScaling, 131072, 64, (200002,), id="gpt-oss-20b"),
        pytest.param(EXAONE_4_32B, [(4096, 0)] * 3 + [(0, None)], [1e6], Llama3Scaling, 131072, 128, (361,), id="exaone-4-32b"),
        pytest.param(EXAONE_4_1B, [(0, 0)], [1e6], Llama3Scaling, 65536, 64, (361,), id="exaone-4-1.2b"),
        pytest.param(GLM_4_32B_0414, [(0, 0)], [1e4], None, 32768, 64, (151329, 151336, 151338), id="glm-4-32b"),
        pytest.param(OLMO_2_7B, [(0, 0)], [5e5], None, 4096, 128, (100257,), id="olmo-2-7b"),
        pytest.param(FALCON_3_7B, [(0, 0)], [1000042.0], None, 32768, 256, (11,), id="falcon-3-7b"),
        pytest.param(STARCODER_2_3B, [(4096, 0)], [999999.4420358813], None, 16384, 128, (0,), id="starcoder-2-3b"),
        pytest.param(MINITRON_4B, [(0, 0)], [1e4], None, 4096, 64, (3,), id="minitron-4b"),
        pytest.param(INTERNLM_3_8B, [(0, 0)], [5e7], None, 32768, 128, (2,), id="internlm-3-8b"),
        pytest.param(PHI_2, [(0, 0)], [1e4], None, 2048, 32, (50256,), id="phi-2"),
        pytest.param(STABLELM_2_1_6B, [(0, 0)], [1e4], None, 4096, 16, (100257,), id="stablelm-2-1.6b"),
        pytest.param(QWEN_1_5_MOE, [(0, 0)], [1e6], None, 8192, 128, (151643,), id="qwen-1.5-moe"),
        pytest.param(GRANITE_3_MOE, [(0, 0)], [1e4], None, 4096, 64, (0,), id="granite-3-3b-a800m"),
        pytest.param(GLM_4_5_AIR, [(0, 0)], [1e6], None, 131072, 64, (151329, 151336, 151338), id="glm-4.5-air"),
        pytest.param(ERNIE_4_5_03B, [(0, 0)], [5e5], None, 131072, 128, (2,), id="ernie-4.5-0.3b"),
        pytest.param(ERNIE_4_5_21B, [(0, 0)], [5e5], None, 131072, 128, (2,), id="ernie-4.5-21b-a3b"),
        pytest.param(MINIMAX_M2, [(0, 0)], [5e6], None, 196608, 64, (200020,), id="minimax-m2"),
        pytest.param(QWEN_3_NEXT_80B, [(0, 0)], [1e7], None, 262144, 64, (151645,), id="qwen-3-next-80b"),
        pytest.param(QWEN_3_5_35B, [(0, 0)], [1e7], None, 262144, 64, (248044,), id="qwen-3.5-35b"),
        pytest.param(HUNYUAN_A13B, [(0, 0)], [1e4 * 1000 ** (128 / 126)], None, 32768, 128, (127960,), id="hunyuan-a13b"),
    ],
)
def test_a_published_config(
    config: dict[str, Any],
    layers: list[tuple[int, int | None]],
    thetas: list[float],
    scaling: type[object] | None,
    max_position: int,
    rotary_dim: int,
    eos: tuple[int, ...],
) -> None:
    """`layers` are each layer's window and rotary embedding, which repeat; the first embedding is scaled."""
    model = parse_model_config(Fields(config, "config.json"), Fields({}, "generation_config.json"))
    expected = [layers[at % len(layers)] for at in range(config["num_hidden_layers"])]
    assert [(layer.window, layer.rope) for layer in model.layers] == expected
    assert [rope.theta for rope in model.ropes] == thetas
    assert model.rotary_dims == (rotary_dim,) * len(thetas)
    assert isinstance(model.ropes[0].scaling, scaling or type(None))
    assert (model.max_position, model.eos_token_ids) == (max_position, eos)


@pytest.mark.parametrize(
    ("config", "first", "size", "shared", "routing"),
    [
        pytest.param(QWEN_1_5_MOE, 0, 1408, 5632, Routing(num_experts=60, top_k=4), id="qwen-1.5-moe"),
        pytest.param(GRANITE_3_MOE, 0, 512, 0, Routing(num_experts=40, top_k=8, renormalize=True), id="granite-3-3b-a800m"),
        pytest.param(OLMOE_1B_7B, 0, 1024, 0, Routing(num_experts=64, top_k=8), id="olmoe-1b-7b"),
        pytest.param(GLM_4_5_AIR, 1, 1408, 1408, SIGMOID, id="glm-4.5-air"),
        pytest.param(ERNIE_4_5_21B, 1, 1536, 3072, ERNIE_ROUTING, id="ernie-4.5-21b-a3b"),
        pytest.param(MINIMAX_M2, 0, 1536, 0, MINIMAX_ROUTING, id="minimax-m2"),
        pytest.param(QWEN_3_NEXT_80B, 0, 512, 512, Routing(num_experts=512, top_k=10, renormalize=True), id="qwen-3-next-80b"),
        pytest.param(QWEN_3_5_35B, 0, 512, 512, Routing(num_experts=256, top_k=8, renormalize=True), id="qwen-3.5-35b"),
        pytest.param(HUNYUAN_A13B, 0, 3072, 3072, HUNYUAN_ROUTING, id="hunyuan-a13b"),
    ],
)
def test_the_experts_of_a_published_config(config: dict[str, Any], first: int, size: int, shared: int, routing: Routing) -> None:
    """All layers from the `first` on have experts."""
    model = parse_model_config(Fields(config, "config.json"), Fields({}, "generation_config.json"))
    layers = tuple(range(first, config["num_hidden_layers"]))
    gate = "Qwen" in config["architectures"][0]
    assert model.moe == MoeConfig(layers=layers, intermediate_size=size, routing=routing, shared_size=shared, shared_gate=gate)


@pytest.mark.parametrize(
    ("config", "positions", "first", "activation"),
    [
        pytest.param(GPT_2, 1024, 0, "gelu_pytorch_tanh", id="gpt-2"),
        pytest.param(GPT_2 | {"n_positions": None}, 1024, 0, "gelu_pytorch_tanh", id="gpt-2-by-default"),
        pytest.param(OPT_125M, 2048, 2, "relu", id="opt-125m"),
    ],
)
def test_the_positions_of_a_published_config(config: dict[str, Any], positions: int, first: int, activation: str) -> None:
    model = parse_model_config(Fields(config, "config.json"), Fields({}, "generation_config.json"))
    assert (model.max_position, model.traits.positions_from, model.ropes) == (positions, first, ())
    assert (model.hidden_act, model.intermediate_size, model.head_dim) == (activation, 3072, 64)
    assert model.tie_word_embeddings and not any(layer.rope for layer in model.layers)


@pytest.mark.parametrize("config", [QWEN_3_NEXT_80B, QWEN_3_5_35B], ids=["qwen-3-next", "qwen-3.5"])
def test_the_states_of_a_published_config(config: dict[str, Any]) -> None:
    model = parse_model_config(Fields(config, "config.json"), Fields({}, "generation_config.json"))
    assert [layer.has_state for layer in model.layers] == [True, True, True, False] * (model.num_layers // 4)
    assert (model.traits.attention_gate, model.traits.norm, model.traits.qk_norm) == ("element", "one plus weight", "head")
    matrix, inputs = StatePart(32, (128, 128)), StatePart(3, (8192,))
    assert state_specs(model)[0] == StateSpec((matrix, inputs)), "32 heads, and 2 * 16 * 128 + 32 * 128 channels"
    quarter = StateSpec((StatePart(8, (128, 128)), StatePart(3, (2048,))))
    assert [*state_specs(model, Shard(1, 4)).items()][1] == (1, quarter)
    assert sorted(kv_specs(model, 16, "bfloat16")) == [*range(3, model.num_layers, 4)]


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (QWEN_3_NEXT_80B, {"linear_num_key_heads": 0}, ["linear_num_key_heads", "at least 1"]),
        (QWEN_3_NEXT_80B, {"linear_num_value_heads": None}, ["linear_num_value_heads is missing"]),
        (QWEN_3_NEXT_80B, {"linear_num_value_heads": 24}, ["linear_num_value_heads (24)", "linear_num_key_heads (16)"]),
        (QWEN_3_NEXT_80B, {"linear_conv_kernel_dim": 0}, ["linear_conv_kernel_dim", "at least 2"]),
        (QWEN_3_NEXT_80B, {"linear_value_head_dim": 1 << 18}, ["linear_value_head_dim", "1048576 elements"]),
        (QWEN_3_NEXT_80B, {"hidden_act": "gelu"}, ["hidden_act 'gelu'", "linear_attention", "silu"]),
        (QWEN_3_NEXT_80B, {"full_attention_interval": 0}, ["full_attention_interval", "at least 1"]),
        (QWEN_3_NEXT_80B, {"is_causal": False}, ["both directions", "recurrent state"]),
        (QWEN_3_5_35B, {"layer_types": ["full_attention"]}, ["layer_types", "40"]),
        (QWEN_3_5_35B, {"layer_types": ["mamba"] * 40}, ["'mamba'", "linear_attention, full_attention"]),
        (ERNIE_4_5_21B, {"use_bias": True}, ["use_bias: true"]),
        (ERNIE_4_5_21B, {"moe_norm_min": 0.1}, ["moe_norm_min"]),
        (MINIMAX_M2, {"attn_type_list": [0, 1]}, ["attn_type_list"]),
        (MINIMAX_M2, {"use_qk_norm": False}, ["use_qk_norm: false"]),
        (MINIMAX_M2, {"scoring_func": "softmax"}, ["scoring_func", "softmax", "sigmoid"]),
        (MINIMAX_M2, {"shared_intermediate_size": 8}, ["shared_intermediate_size"]),
        (HUNYUAN_A13B, {"use_cla": True}, ["use_cla: true"]),
        (GPT_2, {"n_head": 0}, ["n_head must be an integer of at least 1"]),
        (GPT_2, {"activation_function": "tanh"}, ["activation_function 'tanh'", "silu, gelu, gelu_pytorch_tanh, relu2, gelu_new"]),
        (GPT_2, {"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["GPT2LMHeadModel", "quantization_config"]),
        (GPT_2, {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx: true"]),
        (OPT_125M, {"do_layer_norm_before": False}, ["do_layer_norm_before: false"]),
        (OPT_125M, {"word_embed_proj_dim": 512}, ["word_embed_proj_dim must be hidden_size"]),
        (OLMOE_1B_7B, {"clip_qkv": 8.0}, ["clip_qkv"]),
        (HUNYUAN_A13B, {"moe_topk": [8] * 31 + [4]}, ["moe_topk", "differ"]),
        (HUNYUAN_A13B, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_scaling", "alpha is missing"]),
    ],
)
def test_what_is_not_served_is_named(config: dict[str, Any], changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        parse_model_config(Fields(config | changes, "config.json"), Fields({}, "generation_config.json"))
    assert all(word in str(caught.value) for word in ["config.json", *words]), caught.value
