"""Trinity (AFMoE): gated attention, norms around both parts, windows where heads rotate, and experts chosen by sigmoids."""

from starling_engine.model_config.definition import ModelDefinition, TensorNames, patterned_windows
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig
from starling_engine.model_config.moe import MoeConfig, Routing, checked, read_num_experts
from starling_engine.model_config.traits import Traits

DEFAULT_WINDOW, DEFAULT_PATTERN = 1024, 4
NAMES = TensorNames(
    attention_gate="self_attn.gate_proj",
    mlp_norm="pre_mlp_layernorm",
    mlp_out_norm="post_mlp_layernorm",
    router="mlp.router.gate",
    router_bias="mlp.expert_bias",
)


def _traits(config: Fields) -> Traits:
    config.only("attention_bias", False)
    scale = config.integer("hidden_size") ** 0.5 if config.boolean("mup_enabled", False) else 1.0
    return Traits(qk_norm="head", attention_gate="element", embedding_scale=scale)


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """Returns layers of which those that see all tokens are not rotated: by `layer_types`, or else every fourth."""
    window = config.integer("sliding_window", DEFAULT_WINDOW)
    pattern = config.integer("global_attn_every_n_layers", DEFAULT_PATTERN)
    windows = patterned_windows(config, num_layers, window, pattern)
    return tuple(LayerConfig(window=each, rope=0 if each else None, norms="both") for each in windows)


def _moe(config: Fields, num_layers: int) -> MoeConfig | None:
    layers = tuple(range(config.integer("num_dense_layers", 1, low=0), num_layers))
    if not layers:
        return None
    config.one_of("score_func", "sigmoid")
    config.only("route_norm", True)
    for name in ("n_group", "topk_group"):
        if config.integer(name, 1) != 1:
            raise config.error(name, "must be 1")
    routing = Routing(
        num_experts=read_num_experts(config, "num_experts", "num_local_experts"),
        top_k=config.integer("num_experts_per_tok", 6),
        score="sigmoid",
        bias=True,
        renormalize=True,
        scaling=config.number("route_scale", 1.0),
    )
    size = config.integer("moe_intermediate_size")
    return MoeConfig(
        layers=layers,
        intermediate_size=size,
        routing=checked(config, routing),
        shared_size=size * config.integer("num_shared_experts", 2, low=0),
    )


AFMOE = ModelDefinition(
    architecture="AfmoeForCausalLM", traits=_traits, layers=_layers, moe=_moe, head_dim=128, rms_eps=1e-5, names=NAMES
)
