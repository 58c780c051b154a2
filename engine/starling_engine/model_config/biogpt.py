"""BioGPT (arXiv 2210.10341): OPT with GELU and scaled embeddings."""

from dataclasses import replace

from starling_engine.model_config.definition import TensorNames
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.opt import OPT, UNUSED_POSITIONS
from starling_engine.model_config.traits import Traits

NAMES = TensorNames(
    embedding="biogpt.embed_tokens",
    positions="biogpt.embed_positions",
    norm="biogpt.layer_norm",
    lm_head="output_projection",
    layer="biogpt.layers.{}",
    o="self_attn.out_proj",
    up="fc1",
    down="fc2",
    attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
)


def _traits(config: Fields) -> Traits:
    scale = config.integer("hidden_size") ** 0.5 if config.boolean("scale_embedding", True) else 1.0
    return Traits(
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        mlp_gate=False,
        norm="biased layer",
        positions_from=UNUSED_POSITIONS,
        positions_counted=False,
        embedding_scale=scale,
    )


BIOGPT = replace(
    OPT,
    architecture="BioGptForCausalLM",
    traits=_traits,
    mlp_field="intermediate_size",
    activation="gelu",
    field_names={},
    names=NAMES,
)
