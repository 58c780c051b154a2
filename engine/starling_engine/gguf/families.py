"""The architectures of llama.cpp that are read, each as a family here: its config's fields, and the names of its tensors.

Fields are what the family's own config.json has beside those that `config.py` reads of all. llama.cpp's converter (conversion/*.py)
and its models (src/models/*.cpp) say what is in a file.
"""

from collections.abc import Mapping
from typing import Any

from starling_engine.gguf import names
from starling_engine.gguf.encoders import ENCODERS
from starling_engine.gguf.family import (
    SIGMOID,
    Config,
    GgufFamily,
    family,
    nothing,
    only_scored_by,
    present,
    read_experts,
    read_windows,
    temperature_length,
)
from starling_engine.gguf.gemma import GEMMAS
from starling_engine.gguf.heads import answer_head
from starling_engine.gguf.latents import LATENT
from starling_engine.gguf.metadata import GgufMetadata
from starling_engine.gguf.names import ModuleNames, Stored
from starling_engine.gguf.rope import DEFAULT_THETA, read_scaling

MAVERICK_EXPERTS = 128


def _llama(data: GgufMetadata) -> Config:
    """Reads what may also be Mistral or Mixtral, which llama.cpp has no names for."""
    if data.get("expert_count", 0):
        return {"architectures": ["MixtralForCausalLM"], **read_experts(data)}
    if (window := data.get("attention.sliding_window")) is not None:
        return {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    return {}


def _mistral3(data: GgufMetadata) -> Config:
    """Reads the fields of Ministral 3, whose queries have a temperature; without one the model is Mistral."""
    beta = data.get("attention.temperature_scale", 0.0)
    if not beta:
        return read_windows(data)
    original = temperature_length(data)
    rope = {**(read_scaling(data) or {}), "rope_theta": data.number("rope.freq_base", DEFAULT_THETA)}
    return {
        **read_windows(data),
        "architectures": ["Ministral3ForCausalLM"],
        "rope_parameters": {**rope, "llama_4_scaling_beta": beta, "original_max_position_embeddings": original},
        "rope_scaling": None,
    }


def _llama4(data: GgufMetadata) -> Config:
    """Reads the fields of Llama 4. That Maverick alone, with 128 experts, has no norms of queries and keys is not in a file.

    Neither are the chunks of attention and the temperature of queries, which are the same in all models. A window of 0 says that
    all layers are rotated and see all tokens. Llama Guard 4 and MobileLLM have no experts, and a step of 0.
    """
    step, full = data.get("interleave_moe_layer_step", 0), data.get("attention.sliding_window") == 0
    experts = read_experts(data) if step or data.get("expert_count", 0) else {"moe_layers": [], "num_experts": 0}
    every = {"layer_types": ["full_attention" for _ in data.layers], "no_rope_layers": [1 for _ in data.layers]}
    return {
        **experts,
        **(every if full else {}),
        "intermediate_size_mlp": data.number("feed_forward_length"),
        "intermediate_size": data.number("expert_feed_forward_length"),
        "interleave_moe_layer_step": step,
        "use_qk_norm": experts["num_experts"] != MAVERICK_EXPERTS,
    }


def _shared_width(data: GgufMetadata) -> Config:
    return {"shared_expert_intermediate_size": data.number("expert_shared_feed_forward_length")}


def _qwen2_moe(data: GgufMetadata) -> Config:
    return {**read_experts(data), **_shared_width(data), "qkv_bias": "attn_q.bias" in data.modules}


def _qwen3_moe(data: GgufMetadata) -> Config:
    return {**read_experts(data), "norm_topk_prob": True, "attention_bias": False}


def _gated_delta(data: GgufMetadata) -> Config:
    values = data.number("ssm.time_step_rank")
    return {
        "layer_types": data.kinds({"ssm_out.weight": "linear_attention"}, "full_attention"),
        "linear_num_key_heads": data.number("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": data.number("ssm.state_size"),
        "linear_value_head_dim": data.number("ssm.inner_size") / values,
        "linear_conv_kernel_dim": data.number("ssm.conv_kernel"),
    }


def _qwen3_5_moe(data: GgufMetadata) -> Config:
    return {**read_experts(data), **_shared_width(data), **_gated_delta(data)}


def _gpt_oss(data: GgufMetadata) -> Config:
    """Reads the fields of gpt-oss. The band of its YaRN has borders that are not rounded, which no file says."""
    scaling = read_scaling(data)
    return {
        **read_windows(data),
        **read_experts(data),
        "intermediate_size": data.number("expert_feed_forward_length"),
        "rope_scaling": scaling and {**scaling, "truncate": False},
    }


def _granite(data: GgufMetadata) -> Config:
    """Reads the multipliers, which count as absent where they are 0."""
    keys = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    found = {field: data.get(key) for field, key in keys.items() if data.get(key)}
    return {"attention_multiplier": _head_dim(data) ** -0.5, **found}


def _head_dim(data: GgufMetadata) -> int:
    width: int = data.number("embedding_length") // data.number("attention.head_count")
    return width


def _granite_moe(data: GgufMetadata) -> Config:
    shared = present(data, shared_intermediate_size="expert_shared_feed_forward_length")
    name = "GraniteMoeSharedForCausalLM" if shared else "GraniteMoeForCausalLM"
    return {**_granite(data), **read_experts(data), **shared, "architectures": [name]}


def _granite_hybrid(data: GgufMetadata) -> Config:
    """Reads the fields of Granite 4, or of Bamba, which rotates and has no multipliers."""
    if data.get("rope.scaling.finetuned", True) and not data.get("embedding_scale"):
        return _bamba(data)
    width = data.get("expert_shared_feed_forward_length") or data.number("feed_forward_length")
    return {
        **_granite(data),
        **(read_experts(data) if data.get("expert_count", 0) else {"num_local_experts": 0}),
        **_mamba2(data),
        "shared_intermediate_size": width,
        "layer_types": data.kinds({"ssm_in.weight": "mamba"}, "attention"),
        "position_embedding_type": "rope" if data.get("rope.scaling.finetuned", True) else "nope",
    }


def _bamba(data: GgufMetadata) -> Config:
    kinds = data.kinds({"ssm_in.weight": "mamba"}, "attention")
    attending = [layer for layer, kind in enumerate(kinds) if kind == "attention"]
    return {"architectures": ["BambaForCausalLM"], **_mamba2(data), "attn_layer_indices": attending}


def _mamba2(data: GgufMetadata) -> Config:
    """Returns the sizes of Mamba-2 by the names of families that attend, too."""
    heads, width = data.number("ssm.time_step_rank"), data.number("ssm.inner_size")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": width / heads,
        "mamba_expand": width / data.number("embedding_length"),
        "mamba_n_groups": data.number("ssm.group_count"),
        **_state_space(data),
    }


def _state_space(data: GgufMetadata) -> Config:
    return {
        "mamba_d_state": data.number("ssm.state_size"),
        "mamba_d_conv": data.number("ssm.conv_kernel"),
        "mamba_conv_bias": "ssm_conv1d.bias" in data.modules,
        "mamba_proj_bias": "ssm_in.bias" in data.modules,
    }


def _mamba_alone(data: GgufMetadata) -> Config:
    if data.get("ssm.dt_b_c_rms", False):
        return {**_mamba(data), "architectures": ["FalconMambaForCausalLM"], "mixer_rms_eps": 1e-6}
    return _mamba(data)


def _mamba(data: GgufMetadata) -> Config:
    return {
        "mamba_channels": data.number("ssm.inner_size"),
        "mamba_expand": data.number("ssm.inner_size") / data.number("embedding_length"),
        "mamba_dt_rank": data.number("ssm.time_step_rank"),
        **_state_space(data),
    }


def _falcon_h1(data: GgufMetadata) -> Config:
    """Reads the fields of Falcon-H1, whose multipliers the converter has multiplied into its matrices.

    Where there is a norm, the gate comes before it, as in llama.cpp: no file says so.
    """
    width, norm = data.number("ssm.inner_size"), "ssm_norm.weight" in data.modules
    return {**_mamba2(data), "mamba_expand": None, "mamba_d_ssm": width, "mamba_rms_norm": norm, "mamba_norm_before_gate": False}


def _nemotron_h(data: GgufMetadata) -> Config:
    parts = {"ssm_in.weight": "mamba", "attn_q.weight": "attention", "ffn_gate_inp.weight": "moe"}
    shared = present(data, moe_shared_expert_intermediate_size="expert_shared_feed_forward_length")
    experts = {**read_experts(data), **shared} if data.get("expert_count", 0) else {}
    if data.get("moe_latent_size"):
        raise data.refused("moe_latent_size", "is not supported; supported: none")
    return {
        **experts,
        **_mamba2(data),
        "use_bias": "ssm_in.bias" in data.modules,
        "layers_block_type": data.kinds(parts, "mlp"),
        "intermediate_size": _width_of(data, "ffn_up.weight"),
    }


def _width_of(data: GgufMetadata, module: str) -> int:
    """Returns the rows of the first layer's matrix of this name: 1 where no layer has it."""
    found = (tensor for name, tensor in data.file.tensors.items() if name.endswith(f".{module}"))
    return next((tensor.shape[0] for tensor in found), 1)


def _jamba(data: GgufMetadata) -> Config:
    return {
        **_mamba(data),
        **(read_experts(data) if "ffn_gate_inp.weight" in data.modules else {"num_experts": 1}),
        **_periods(data, "attn", "attn_q.weight"),
        **_periods(data, "expert", "ffn_gate_inp.weight"),
    }


def _periods(data: GgufMetadata, kind: str, module: str) -> Config:
    """Returns from which layer on, and how far apart, layers have that module."""
    kinds = data.kinds({module: kind}, "")
    layers = [at for at, each in enumerate(kinds) if each]
    if not layers:
        return {f"{kind}_layer_period": data.num_layers + 1, f"{kind}_layer_offset": data.num_layers}
    period = layers[1] - layers[0] if len(layers) > 1 else data.num_layers
    if layers != list(range(layers[0], len(kinds), period)):
        raise data.refused("block_count", f"layers with {module} have to be as far apart as the first two: {layers}")
    return {f"{kind}_layer_period": period, f"{kind}_layer_offset": layers[0]}


def _lfm2(data: GgufMetadata) -> Config:
    experts: Mapping[str, Any] = {}
    if data.get("expert_count", 0):
        experts = {**read_experts(data), "norm_topk_prob": True, "num_dense_layers": data.get("leading_dense_block_count", 0)}
        only_scored_by(data, SIGMOID)
    return {
        **experts,
        "conv_L_cache": data.number("shortconv.l_cache"),
        "conv_bias": "shortconv.conv.bias" in data.modules,
        "layer_types": data.kinds({"shortconv.conv.weight": "conv"}, "full_attention"),
        "block_auto_adjust_ff_dim": False,
        "use_expert_bias": "exp_probs_b.bias" in data.modules,
    }


def _olmo2(data: GgufMetadata) -> Config:
    windows = read_windows(data)
    return {**windows, "architectures": ["Olmo3ForCausalLM" if windows["sliding_window"] else "Olmo2ForCausalLM"]}


def _glm4_moe(data: GgufMetadata) -> Config:
    return {
        **read_experts(data),
        "n_shared_experts": data.get("expert_shared_count", 0),
        "first_k_dense_replace": data.get("leading_dense_block_count", 0),
        "use_qk_norm": "attn_q_norm.weight" in data.modules,
        "num_nextn_predict_layers": 0,
    }


def _ernie(data: GgufMetadata) -> Config:
    return {"use_bias": "attn_output.bias" in data.modules}


def _ernie_moe(data: GgufMetadata) -> Config:
    return {
        **read_experts(data),
        "moe_layer_start_index": data.get("leading_dense_block_count", 0),
        "moe_layer_interval": data.get("interleave_moe_layer_step", 1),
        "moe_num_shared_experts": data.get("expert_shared_count", 0),
    }


def _seed_oss(data: GgufMetadata) -> Config:
    return {"attention_out_bias": "attn_output.bias" in data.modules}


def _hunyuan_moe(data: GgufMetadata) -> Config:
    return {**read_experts(data), "num_shared_expert": data.get("expert_shared_count", 1)}


def _cohere(data: GgufMetadata) -> Config:
    return {**read_windows(data), "logit_scale": data.number("logit_scale"), "use_qk_norm": "attn_q_norm.weight" in data.modules}


def _starcoder2(data: GgufMetadata) -> Config:
    """Reads the fields of StarCoder2. Its published models have this window, which the converter leaves out."""
    window = data.get("attention.sliding_window", 4096)
    return {"sliding_window": window, "use_bias": "attn_output.bias" in data.modules}


def _nemotron(data: GgufMetadata) -> Config:
    return {"attention_bias": "attn_q.bias" in data.modules}


def _gpt_neox(data: GgufMetadata) -> Config:
    rotated: int = data.number("rope.dimension_count", _head_dim(data))
    parallel = data.get("use_parallel_residual", True)
    return {"use_parallel_residual": parallel, "rotary_pct": rotated / _head_dim(data)}


def _stablelm(data: GgufMetadata) -> Config:
    return {
        "use_qkv_bias": "attn_q.bias" in data.modules,
        "use_parallel_residual": "ffn_norm.weight" not in data.modules,
        "qk_layernorm": "attn_q_norm.weight" in data.modules,
    }


def _minimax(data: GgufMetadata) -> Config:
    only_scored_by(data, SIGMOID)
    return {
        **read_experts(data),
        "intermediate_size": data.number("expert_feed_forward_length"),
        "use_routing_bias": "exp_probs_b.bias" in data.modules,
    }


_DELTA_MOE = (names.SHARED, names.BEFORE_MLP, names.NORMS_PLUS_ONE)
_AFTER_PLUS_ONE: ModuleNames = {"post_attention_norm": Stored("mlp_norm", "one added")}

FAMILIES: Mapping[str, GgufFamily] = {
    **GEMMAS,
    **ENCODERS,
    **LATENT,
    "llama": family("LlamaForCausalLM", _llama, names.PAIRED),
    "mistral3": family("MistralForCausalLM", _mistral3, names.PAIRED),
    "llama4": family("Llama4ForCausalLM", _llama4, names.SHARED),
    "qwen2": family("Qwen2ForCausalLM"),
    "qwen2moe": family("Qwen2MoeForCausalLM", _qwen2_moe, names.SHARED),
    "qwen3": family("Qwen3ForCausalLM", head=answer_head),
    "qwen3moe": family("Qwen3MoeForCausalLM", _qwen3_moe),
    "qwen2vl": family("Qwen2ForCausalLM"),
    "qwen3vl": family("Qwen3ForCausalLM"),
    "qwen3vlmoe": family("Qwen3MoeForCausalLM", _qwen3_moe),
    "qwen3next": family("Qwen3_5MoeForCausalLM", _qwen3_5_moe, *_DELTA_MOE, names.DELTA, _AFTER_PLUS_ONE),
    "qwen35": family("Qwen3_5ForCausalLM", _gated_delta, names.NORMS_PLUS_ONE, names.DELTA, names.VALUE_HEADS, _AFTER_PLUS_ONE),
    "qwen35moe": family("Qwen3_5MoeForCausalLM", _qwen3_5_moe, *_DELTA_MOE, names.DELTA, names.VALUE_HEADS, _AFTER_PLUS_ONE),
    "gpt-oss": family("GptOssForCausalLM", _gpt_oss, names.SINKS, names.BEFORE_MLP),
    "phi3": family("Phi3ForCausalLM", read_windows, names.FUSED_QKV, names.FUSED_GATE_UP),
    "smollm3": family("SmolLM3ForCausalLM", nothing, names.PAIRED),
    "granite": family("GraniteForCausalLM", _granite, names.PAIRED),
    "granitemoe": family("GraniteMoeForCausalLM", _granite_moe, names.PAIRED, names.SHARED),
    "granitehybrid": family("GraniteMoeHybridForCausalLM", _granite_hybrid, names.PAIRED, names.SHARED, names.MAMBA2),
    "lfm2": family("Lfm2ForCausalLM", _lfm2, names.SHORT_CONV, {"token_embd_norm": "norm"}, eps="norm_eps"),
    "lfm2moe": family("Lfm2MoeForCausalLM", _lfm2, names.SHORT_CONV, {"token_embd_norm": "norm"}, eps="norm_eps"),
    "olmo2": family("Olmo2ForCausalLM", _olmo2),
    "glm4": family("Glm4ForCausalLM", nothing, names.FUSED_GATE_UP),
    "glm4moe": family("Glm4MoeForCausalLM", _glm4_moe, names.SHARED, names.BEFORE_MLP),
    "exaone4": family("Exaone4ForCausalLM", read_windows),
    "seed_oss": family("SeedOssForCausalLM", _seed_oss, names.BEFORE_MLP),
    "ernie4_5": family("Ernie4_5ForCausalLM", _ernie),
    "ernie4_5-moe": family(
        "Ernie4_5_MoeForCausalLM", _ernie_moe, names.SHARED, {"exp_probs_b.bias": Stored("router_bias", "row", whole=True)}
    ),
    "hunyuan-dense": family("HunYuanDenseV1ForCausalLM"),
    "hunyuan-moe": family("HunYuanMoEV1ForCausalLM", _hunyuan_moe, names.SHARED),
    "command-r": family("CohereForCausalLM", _cohere, eps="layer_norm_eps"),
    "cohere2": family("Cohere2ForCausalLM", _cohere, eps="layer_norm_eps"),
    "phi2": family("PhiForCausalLM", nothing, names.FUSED_QKV, eps="layer_norm_eps"),
    "gptneox": family("GPTNeoXForCausalLM", _gpt_neox, {"attn_qkv": Stored("q", part="heads in turn")}, eps="layer_norm_eps"),
    "starcoder2": family("Starcoder2ForCausalLM", _starcoder2, eps="norm_epsilon"),
    "apertus": family("ApertusForCausalLM"),
    "arcee": family("ArceeForCausalLM", nothing, names.PAIRED),
    "minimax-m2": family("MiniMaxM2ForCausalLM", _minimax),
    "nemotron": family("NemotronForCausalLM", _nemotron, names.WEIGHTS_PLUS_ONE, eps="norm_eps"),
    "stablelm": family("StableLmForCausalLM", _stablelm, eps="layer_norm_eps"),
    "mamba": family("MambaForCausalLM", _mamba_alone, names.MAMBA, eps="layer_norm_epsilon", attends=False),
    "mamba2": family("Mamba2ForCausalLM", _mamba2, names.MAMBA2, eps="layer_norm_epsilon", attends=False),
    "falcon-h1": family("FalconH1ForCausalLM", _falcon_h1, names.MAMBA2),
    "nemotron_h": family("NemotronHForCausalLM", _nemotron_h, names.MAMBA2, names.SHARED, eps="layer_norm_epsilon"),
    "nemotron_h_moe": family("NemotronHForCausalLM", _nemotron_h, names.MAMBA2, names.SHARED, eps="layer_norm_epsilon"),
    "jamba": family("JambaForCausalLM", _jamba, names.MAMBA),
}
"""Families by llama.cpp's names of architectures."""
