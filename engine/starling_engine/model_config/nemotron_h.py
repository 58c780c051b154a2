"""Nemotron-H, Nemotron Nano 2: each layer is one part alone: Mamba-2, attention without rotation, or an MLP.

MLPs have no gate. Those of Nemotron 3 are experts, and a shared one."""

from dataclasses import replace

from starling_engine.errors import UnsupportedModel
from starling_engine.model_config.definition import ModelDefinition, TensorNames, no_ropes
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig
from starling_engine.model_config.mamba2 import MIXER, Mamba2Config, read_mamba2
from starling_engine.model_config.moe import MoeConfig, Routing, checked, read_num_experts
from starling_engine.model_config.traits import Traits

NAMES = TensorNames(
    embedding="backbone.embeddings",
    norm="backbone.norm_f",
    layer="backbone.layers.{}",
    attention_norm="norm",
    mlp_norm="norm",
    q="mixer.q_proj",
    k="mixer.k_proj",
    v="mixer.v_proj",
    o="mixer.o_proj",
    up="mixer.up_proj",
    down="mixer.down_proj",
    router="mixer.gate",
    router_bias="mixer.gate.e_score_correction_bias",
    fused_router="mixer.gate",
    fused_router_bias="mixer.gate.e_score_correction_bias",
    experts="mixer.experts",
    fused_experts=(("mixer.experts.gate_up_proj",), ("mixer.experts.down_proj",)),
    shared_experts="mixer.shared_experts",
    fused_shared="mixer.shared_experts.gate_up_proj",
    mamba2=MIXER,
    left_out=("mtp.",),
)
FIELD_NAMES = {
    "hidden_act": "mlp_hidden_act",
    "mamba_n_heads": "mamba_num_heads",
    "mamba_d_head": "mamba_head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_state": "ssm_state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
}
"""The family's names of fields, by ours."""
MAMBA = LayerConfig(mixer="mamba2", feed_forward="none", rope=None)
ATTENTION = LayerConfig(feed_forward="none", rope=None)
MLP = LayerConfig(mixer="none", rope=None)
LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Letters of `hybrid_override_pattern`."""
LAYERS = {"mamba": MAMBA, "linear_attention": MAMBA, "attention": ATTENTION, "full_attention": ATTENTION, "mlp": MLP, "moe": MLP}


def _types(config: Fields) -> tuple[str, list[str]]:
    """Returns the types of all layers, and the field that has them."""
    if config.has("hybrid_override_pattern"):
        letters = config.text("hybrid_override_pattern")
        return "hybrid_override_pattern", [LETTERS.get(letter, letter) for letter in letters]
    name = "layers_block_type" if config.has("layers_block_type") else "layer_types"
    types = config.texts(name)
    if not types:
        raise config.error(name, "must be a list of types, one for each layer")
    return name, types


def _num_layers(config: Fields) -> int:
    name, types = _types(config)
    if config.integer("num_hidden_layers", len(types)) != len(types):
        raise config.error("num_hidden_layers", f"must be {len(types)}, the layers of {name}")
    return len(types)


def _layers(config: Fields, _num_layers: int) -> tuple[LayerConfig, ...]:
    name, types = _types(config)
    for kind in types:
        if kind not in LAYERS:
            raise UnsupportedModel(f"{config.source}: {name}: {kind!r} is not supported; supported: {', '.join(LAYERS)}")
    layers = tuple(LAYERS[kind] for kind in types)
    if config.has("sliding_window"):
        raise UnsupportedModel(f"{config.source}: sliding_window is not supported; supported: null")
    return layers


def _moe(config: Fields, _num_layers: int) -> MoeConfig | None:
    """Reads the experts, of a model that has layers with some."""
    layers = tuple(at for at, kind in enumerate(_types(config)[1]) if kind == "moe")
    if not layers:
        return None
    if config.has("moe_latent_size"):
        raise UnsupportedModel(f"{config.source}: moe_latent_size is not supported; supported: null")
    if config.text("mlp_hidden_act", "relu2") != "relu2":
        raise UnsupportedModel(f"{config.source}: mlp_hidden_act of experts is not supported; supported: relu2")
    routing = Routing(
        num_experts=read_num_experts(config, "n_routed_experts", "num_local_experts"),
        top_k=config.integer("num_experts_per_tok", 2),
        score="sigmoid",
        bias=True,
        num_groups=config.integer("n_group", 1),
        top_groups=config.integer("topk_group", 1),
        group_score="best two",
        renormalize=config.boolean("norm_topk_prob", True),
        scaling=config.number("routed_scaling_factor", 1.0),
    )
    return MoeConfig(
        layers=layers,
        intermediate_size=config.integer("moe_intermediate_size"),
        routing=checked(config, routing),
        shared_size=config.integer("moe_shared_expert_intermediate_size"),
        gated=False,
    )


def _traits(config: Fields) -> Traits:
    config.only("attention_bias", False)
    return Traits(mlp_bias=config.boolean("mlp_bias", False), mlp_gate=False)


def _mamba2(config: Fields) -> Mamba2Config:
    """Reads the sizes. The width of all heads is theirs, whatever `expand` says; `use_bias` is of both matrices."""
    width = config.integer("mamba_n_heads", 128) * config.integer("mamba_d_head", 64)
    own = {"hidden_act": config.text("mamba_hidden_act", "silu"), "rms_norm_eps": config.number("layer_norm_epsilon", 1e-5)}
    defaults = {"mamba_n_groups": 8, "mamba_d_state": 128}
    bias = config.boolean("use_bias", False)
    return replace(read_mamba2(config.with_defaults(defaults).with_values(own), width), in_bias=bias, out_bias=bias)


NEMOTRON_H = ModelDefinition(
    architecture="NemotronHForCausalLM",
    traits=_traits,
    num_layers=_num_layers,
    layers=_layers,
    ropes=no_ropes,
    moe=_moe,
    mamba2=_mamba2,
    activation="relu2",
    head_dim=128,
    eps_field="layer_norm_epsilon",
    rms_eps=1e-5,
    field_names=FIELD_NAMES,
    names=NAMES,
)
