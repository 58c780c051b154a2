"""Jamba (arXiv 2403.19887): Mamba in all layers but a few, which attend without rotation; experts in some of either kind."""

from starling_engine.errors import UnsupportedModel
from starling_engine.model_config.definition import ModelDefinition, TensorNames, no_ropes
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig
from starling_engine.model_config.mamba import MambaConfig, read_mamba
from starling_engine.model_config.moe import MoeConfig, Routing, checked, read_num_experts

NAMES = TensorNames(
    mlp_norm="pre_ff_layernorm",
    norm="model.final_layernorm",
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
    router="feed_forward.router",
    fused_router="feed_forward.router",
    experts="feed_forward.experts",
    fused_experts=(("feed_forward.experts.gate_up_proj",), ("feed_forward.experts.down_proj",)),
)


def _periodic(config: Fields, num_layers: int, kind: str, period: int, offset: int) -> tuple[int, ...]:
    """Returns the layers from `kind`_layer_offset on that are `kind`_layer_period apart; the numbers are defaults."""
    every = config.integer(f"{kind}_layer_period", period)
    first = config.integer(f"{kind}_layer_offset", offset, low=0)
    if first >= every:
        raise config.error(f"{kind}_layer_offset", f"must be below {kind}_layer_period ({every})")
    return tuple(range(first, num_layers, every))


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    if config.has("sliding_window"):
        raise UnsupportedModel(f"{config.source}: sliding_window is not supported; supported: null")
    attending = _periodic(config, num_layers, "attn", 8, 4)
    return tuple(LayerConfig(mixer="attention" if at in attending else "mamba", rope=None) for at in range(num_layers))


def _moe(config: Fields, num_layers: int) -> MoeConfig | None:
    """Reads the experts; a layer with one alone has a plain MLP."""
    layers = _periodic(config, num_layers, "expert", 2, 1)
    num_experts = read_num_experts(config, "num_experts") if config.has("num_experts") else 16
    if num_experts == 1 or not layers:
        return None
    routing = Routing(num_experts=num_experts, top_k=config.integer("num_experts_per_tok", 2))
    return MoeConfig(layers=layers, intermediate_size=config.integer("intermediate_size"), routing=checked(config, routing))


def _mamba(config: Fields) -> MambaConfig:
    config.only("mamba_inner_layernorms", True)
    return read_mamba(config, "weights")


JAMBA = ModelDefinition(
    architecture="JambaForCausalLM",
    layers=_layers,
    ropes=no_ropes,
    moe=_moe,
    mamba=_mamba,
    field_names={"num_experts": "num_local_experts"},
    names=NAMES,
)
