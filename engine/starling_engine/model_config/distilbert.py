"""DistilBERT (arXiv 1910.01108): BERT without segments, by other names."""

from dataclasses import replace

from starling_engine.model_config.bert import BERT, NAMES, TRAITS
from starling_engine.model_config.classifier import HeadShape, fixed_head
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.traits import Traits


def _traits(config: Fields) -> Traits:
    config.only("sinusoidal_pos_embds", False)  # the loader would have to make the table
    return TRAITS


def _masked_head(config: Fields) -> HeadShape:
    activation = config.text("hidden_act", "gelu")
    return HeadShape(out="vocab_projector", dense="vocab_transform", activation=activation, norm="vocab_layer_norm")


DISTILBERT = replace(
    BERT,
    architecture="DistilBertModel",
    traits=_traits,
    head=fixed_head(HeadShape(dense="pre_classifier", activation="relu")),
    masked_head=_masked_head,
    field_names={
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "hidden_act": "activation",
    },
    names=replace(
        NAMES,
        layer="transformer.layer.{}",
        q="attention.q_lin",
        k="attention.k_lin",
        v="attention.v_lin",
        o="attention.out_lin",
        attention_out_norm="sa_layer_norm",
        up="ffn.lin1",
        down="ffn.lin2",
        mlp_out_norm="output_layer_norm",
        left_out=("pre_classifier.", "classifier.", "vocab_"),
    ),
)
