"""OPT (arXiv 2205.01068): learnt positions, LayerNorm before both parts, ReLU without a gate. 350M, which differs, is refused."""

from starling_engine.model_config.definition import ModelDefinition, TensorNames, no_ropes
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig
from starling_engine.model_config.traits import Traits

UNUSED_POSITIONS = 2
"""Rows of the table of positions that no token takes, beside those of the longest sequence."""
NAMES = TensorNames(
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    norm="model.decoder.final_layer_norm",
    layer="model.decoder.layers.{}",
    o="self_attn.out_proj",
    up="fc1",
    down="fc2",
    attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
)


def _traits(config: Fields) -> Traits:
    config.only("do_layer_norm_before", True)
    config.only("_remove_final_layer_norm", False)
    config.only("layer_norm_elementwise_affine", True)
    if config.integer("word_embed_proj_dim", config.integer("hidden_size")) != config.integer("hidden_size"):
        raise config.error("word_embed_proj_dim", "must be hidden_size: embeddings of another width are not supported")
    bias = config.boolean("enable_bias", True)
    return Traits(
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        mlp_gate=False,
        norm="biased layer",
        positions_from=UNUSED_POSITIONS,
        positions_counted=False,
    )


OPT = ModelDefinition(
    architecture="OPTForCausalLM",
    traits=_traits,
    layers=lambda _config, num_layers: (LayerConfig(rope=None),) * num_layers,
    ropes=no_ropes,
    mlp_field="ffn_dim",
    activation="relu",
    field_names={"hidden_act": "activation_function"},
    rms_eps=1e-5,
    tie_word_embeddings=True,
    names=NAMES,
)
