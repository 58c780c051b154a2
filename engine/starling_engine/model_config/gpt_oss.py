"""gpt-oss: attention with sinks, of which every second layer slides; experts with biases and a clamped gate in every layer."""

from starling_engine.model_config.definition import ModelDefinition, TensorNames, patterned_windows
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig, with_windows
from starling_engine.model_config.moe import ClampedSwiglu, MoeConfig, Routing, checked, read_num_experts
from starling_engine.model_config.traits import Traits

DEFAULT_WINDOW, DEFAULT_PATTERN = 128, 2
NAMES = TensorNames(router="mlp.router", fused_router="mlp.router", expert_layout="alternating columns")


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    window = config.integer("sliding_window", DEFAULT_WINDOW)
    return with_windows(patterned_windows(config, num_layers, window, DEFAULT_PATTERN))


def _moe(config: Fields, num_layers: int) -> MoeConfig:
    """Reads the experts. Softmax over the chosen ones is softmax over all, divided by the sum of the chosen."""
    routing = Routing(
        num_experts=read_num_experts(config, "num_local_experts", "num_experts"),
        top_k=config.integer("num_experts_per_tok", 4),
        renormalize=True,
    )
    return MoeConfig(
        layers=tuple(range(num_layers)),
        intermediate_size=config.integer("intermediate_size"),
        routing=checked(config, routing),
        bias=True,
        gate=ClampedSwiglu(alpha=config.number("swiglu_alpha", 1.702), limit=config.number("swiglu_limit", 7.0)),
    )


def _traits(config: Fields) -> Traits:
    bias = config.boolean("attention_bias", True)
    return Traits(qkv_bias=bias, o_bias=bias, attention_sinks=True)


GPT_OSS = ModelDefinition(
    architecture="GptOssForCausalLM",
    traits=_traits,
    layers=_layers,
    moe=_moe,
    names=NAMES,
    head_dim=64,
    rope_theta=150000.0,
    rms_eps=1e-5,
)
