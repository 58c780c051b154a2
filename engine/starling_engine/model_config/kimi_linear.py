"""Kimi Linear (arXiv 2510.26692): three of four layers are Kimi Delta Attention, the others have latents and rotate nothing.

Experts and their choice are DeepSeek-V3's.
"""

from starling_engine.errors import ModelError
from starling_engine.model_config.deepseek import listed_expert_layers, read_latents, read_sigmoid_moe
from starling_engine.model_config.definition import ModelDefinition, TensorNames, no_ropes
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.gated_delta import (
    MAX_CHANNELS,
    MAX_HEADS,
    MAX_KERNEL,
    DeltaNames,
    GatedDeltaConfig,
    hybrid_layers,
)
from starling_engine.model_config.layer import LayerConfig, Mixer
from starling_engine.model_config.mla_shape import MlaShape
from starling_engine.model_config.moe import MoeConfig
from starling_engine.model_config.traits import Traits

MIXERS: dict[str, Mixer] = {"linear_attention": "kimi delta attention", "full_attention": "attention"}
FIELD_NAMES = {
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "scoring_func": "moe_router_activation_func",
}
EXPERTS = "block_sparse_moe"
NAMES = TensorNames(
    other_mlp=EXPERTS,  # as which transformers 5 saves it
    router=f"{EXPERTS}.gate",
    router_bias=f"{EXPERTS}.gate.e_score_correction_bias",
    experts=f"{EXPERTS}.experts",
    expert_projections=("w1", "w3", "w2"),
    shared_experts=f"{EXPERTS}.shared_experts",
    fused_shared=f"{EXPERTS}.shared_experts.gate_up_proj",
    delta=DeltaNames(
        q="self_attn.q_proj",
        k="self_attn.k_proj",
        v="self_attn.v_proj",
        b="self_attn.b_proj",
        decay_in="self_attn.f_a_proj",
        decay_out="self_attn.f_b_proj",
        gate_in="self_attn.g_a_proj",
        gate_out="self_attn.g_b_proj",
        q_conv="self_attn.q_conv1d",
        k_conv="self_attn.k_conv1d",
        v_conv="self_attn.v_conv1d",
        fused_conv="self_attn.conv1d",
        a_log="self_attn.A_log",
        dt_bias="self_attn.dt_bias",
        norm="self_attn.o_norm",
        out="self_attn.o_proj",
    ),
)


def _traits(config: Fields) -> Traits:
    config.only("mla_use_nope", True)
    bias = config.boolean("attention_bias", False)
    return Traits(qkv_bias=bias, o_bias=bias, num_draft_layers=config.integer("num_nextn_predict_layers", 0, low=0))


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """Returns layers of which those attend that `layer_types` or the authors' lists name, which count from 1."""
    linear = config.child("linear_attn_config")
    if linear.has("full_attn_layers"):
        attending = {layer - 1 for layer in linear.integers("full_attn_layers")}
        listed = attending | {layer - 1 for layer in linear.integers("kda_layers")}
        if listed != set(range(num_layers)):
            raise ModelError(
                f"{linear.source}: full_attn_layers and kda_layers must name all layers from 1 to num_hidden_layers ({num_layers})"
            )
    else:
        attending = set(range(4, num_layers, 4))
    written = ["full_attention" if layer in attending else "linear_attention" for layer in range(num_layers)]
    return hybrid_layers(config, num_layers, written, rope=None, mixers=MIXERS)


def _delta(config: Fields) -> GatedDeltaConfig:
    """Reads the sizes: all heads are alike, and the narrow matrices are as wide as one."""
    linear = config.child("linear_attn_config")

    def size(ours: str, theirs: str, default: int, high: int, low: int = 1) -> int:
        if linear.has(theirs):
            return linear.integer(theirs, low=low, high=high)
        return config.integer(ours, default, low=low, high=high)

    heads = size("linear_num_heads", "num_heads", 32, MAX_HEADS)
    dim = size("linear_head_dim", "head_dim", 128, MAX_CHANNELS // heads)
    return GatedDeltaConfig(
        key_heads=heads,
        value_heads=heads,
        key_dim=dim,
        value_dim=dim,
        kernel=size("linear_conv_kernel_dim", "short_conv_kernel_size", 4, MAX_KERNEL, low=2),
        norm_eps=config.number("rms_norm_eps", 1e-5),
        gate_rank=dim,
    )


def _latents(config: Fields, num_heads: int) -> MlaShape:
    return read_latents(config, num_heads, interleaved=False)


def _moe(config: Fields, num_layers: int) -> MoeConfig | None:
    return read_sigmoid_moe(
        config, num_layers, first=1, groups=(1, 1), scaling=2.446, layers=listed_expert_layers(config, num_layers)
    )


KIMI_LINEAR = ModelDefinition(
    architecture="KimiLinearForCausalLM",
    traits=_traits,
    layers=_layers,
    ropes=no_ropes,
    mla=_latents,
    moe=_moe,
    gated_delta=_delta,
    length_field="model_max_length",
    rms_eps=1e-5,
    field_names=FIELD_NAMES,
    names=NAMES,
)
