"""Granite 4: most layers of the H models are Mamba-2, the others attend; with experts and a shared one, or a plain MLP.

The models without H are Granite 3 by another name: all of their layers attend.
"""

from dataclasses import replace

from starling_engine.errors import UnsupportedModel
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.gated_delta import hybrid_layers
from starling_engine.model_config.granite import GRANITE
from starling_engine.model_config.granite_moe import NAMES, read_shared_moe
from starling_engine.model_config.layer import LayerConfig
from starling_engine.model_config.mamba2 import MAMBA_MIXERS, read_mamba2
from starling_engine.model_config.moe import MoeConfig


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """Returns layers by `layer_types`, without which all are Mamba-2. Queries are rotated where the config says so."""
    kind = config.text("position_embedding_type", "nope")
    if kind not in ("nope", "rope"):
        raise UnsupportedModel(f"{config.source}: position_embedding_type {kind!r} is not supported; supported: nope, rope")
    layers = hybrid_layers(config, num_layers, ["mamba"] * num_layers, mixers=MAMBA_MIXERS)
    return tuple(replace(layer, rope=0 if kind == "rope" else None) for layer in layers)


def _moe(config: Fields, num_layers: int) -> MoeConfig | None:
    return read_shared_moe(config, num_layers) if config.integer("num_local_experts", 8, low=0) else None


GRANITE_MOE_HYBRID = replace(
    GRANITE,
    architecture="GraniteMoeHybridForCausalLM",
    layers=_layers,
    moe=_moe,
    mamba2=read_mamba2,
    mlp_field="shared_intermediate_size",
    names=replace(
        NAMES,
        gate="shared_mlp.gate_proj",
        up="shared_mlp.up_proj",
        down="shared_mlp.output_linear",
        fused_gate_up="shared_mlp.input_linear",
    ),
)
