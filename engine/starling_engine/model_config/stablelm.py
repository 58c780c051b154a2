"""StableLM: Llama with LayerNorm and partly rotated heads; attention and MLP may lie side by side behind one norm."""

from starling_engine.model_config.definition import ModelDefinition, partial_rope
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig, with_windows
from starling_engine.model_config.traits import Traits


def _traits(config: Fields) -> Traits:
    config.only("qk_layernorm", False, of="StableLM 2 12B")
    return Traits(qkv_bias=config.boolean("use_qkv_bias", False), norm="biased layer")


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    return with_windows((0,) * num_layers, "parallel" if config.boolean("use_parallel_residual", False) else "before")


STABLELM = ModelDefinition(
    architecture="StableLmForCausalLM",
    traits=_traits,
    layers=_layers,
    ropes=partial_rope(0.25),
    eps_field="layer_norm_eps",
    rms_eps=1e-5,
)
