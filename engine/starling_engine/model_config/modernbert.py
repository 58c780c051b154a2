"""ModernBERT (arXiv 2412.13663): norms of the input, rotated heads, gated MLPs; two of three layers see near tokens alone."""

from dataclasses import replace

from starling_engine.model_config.classifier import HeadShape
from starling_engine.model_config.definition import ModelDefinition, TensorNames, listed_windows
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig
from starling_engine.model_config.rope import RopeConfig, read_ropes
from starling_engine.model_config.traits import Traits

GLOBAL_THETA, LOCAL_THETA = 160_000.0, 10_000.0


def _traits(config: Fields) -> Traits:
    attention, mlp = config.boolean("attention_bias", False), config.boolean("mlp_bias", False)
    traits = Traits(qkv_bias=attention, o_bias=attention, mlp_bias=mlp, embedding_norm=True, norm="layer")
    return replace(traits, norm="biased layer") if config.boolean("norm_bias", False) else traits


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """Returns the layers. The first one's input is normed already, behind the embedding."""
    window, every = config.integer("local_attention", 128) // 2 + 1, config.integer("global_attn_every_n_layers", 3)
    listed = listed_windows(config, num_layers, window)
    windows = listed or tuple(window if at % every else 0 for at in range(num_layers))
    return tuple(
        LayerConfig(window=window, rope=1 if window else 0, norms="before" if at else "before feed-forward")
        for at, window in enumerate(windows)
    )


def _ropes(config: Fields, _theta: float) -> tuple[RopeConfig, ...]:
    return read_ropes(config, config.number("global_rope_theta", GLOBAL_THETA), config.number("local_rope_theta", LOCAL_THETA))


def _head(config: Fields) -> HeadShape:
    pooling = config.one_of("classifier_pooling", "cls", "mean")
    activation = config.one_of("classifier_activation", "gelu")
    return HeadShape(
        dense="head.dense",
        dense_bias=config.boolean("classifier_bias", False),
        activation=activation,
        norm="head.norm",
        pooling="mean" if pooling == "mean" else "cls",
    )


def _masked_head(config: Fields) -> HeadShape:
    return replace(_head(config), out="decoder", bias=config.boolean("decoder_bias", True))


MODERNBERT = ModelDefinition(
    architecture="ModernBertModel",
    traits=_traits,
    layers=_layers,
    ropes=_ropes,
    causal=False,
    head=_head,
    token_head=_head,
    masked_head=_masked_head,
    activation="gelu",
    eps_field="norm_eps",
    rms_eps=1e-5,
    tie_word_embeddings=True,
    names=TensorNames(
        embedding="embeddings.tok_embeddings",
        embedding_norm="embeddings.norm",
        layer="layers.{}",
        fused_qkv="attn.Wqkv",
        o="attn.Wo",
        attention_norm="attn_norm",
        mlp_norm="mlp_norm",
        fused_gate_up="mlp.Wi",
        down="mlp.Wo",
        norm="final_norm",
        left_out=("head.", "decoder.", "classifier."),
    ),
)
