"""BERT and RoBERTa (arXiv 1810.04805, 1907.11692), with XLM-RoBERTa: norms of the sum, learnt positions, segments."""

from dataclasses import replace

from starling_engine.model_config.classifier import HeadShape, fixed_head
from starling_engine.model_config.definition import ModelDefinition, TensorNames, no_ropes
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig
from starling_engine.model_config.traits import Traits

NAMES = TensorNames(
    embedding="embeddings.word_embeddings",
    layer="encoder.layer.{}",
    q="attention.self.query",
    k="attention.self.key",
    v="attention.self.value",
    o="attention.output.dense",
    attention_out_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    mlp_out_norm="output.LayerNorm",
    ignored=("embeddings.position_ids", "embeddings.token_type_ids"),
    left_out=("pooler.", "cls.", "lm_head.", "classifier.", "linear."),
)
TRAITS = Traits(
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    mlp_gate=False,
    positions_from=0,
    embedding_norm=True,
    final_norm=False,
    norm="biased layer",
)


def sum_norms(_config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """Returns the layers of an encoder as the first ones were: nothing is rotated, and norms are of the sum."""
    return (LayerConfig(rope=None, norms="sum"),) * num_layers


def _masked_head(config: Fields) -> HeadShape:
    of = "cls.predictions"
    activation = config.text("hidden_act", "gelu")
    return HeadShape(out=of, dense=f"{of}.transform.dense", activation=activation, norm=f"{of}.transform.LayerNorm")


def bert_traits(config: Fields) -> Traits:
    config.only("is_decoder", False)
    config.one_of("position_embedding_type", "absolute")
    return replace(TRAITS, token_types=config.integer("type_vocab_size", 2, high=1 << 16))


def _roberta_traits(config: Fields) -> Traits:
    """The first rows of the table belong to tokens that fill a batch up, and those before them."""
    return replace(bert_traits(config), positions_from=config.integer("pad_token_id", 1, low=0) + 1)


BERT = ModelDefinition(
    architecture="BertModel",
    traits=bert_traits,
    layers=sum_norms,
    ropes=no_ropes,
    causal=False,
    head=fixed_head(HeadShape(dense="pooler.dense")),
    token_head=fixed_head(HeadShape()),
    masked_head=_masked_head,
    activation="gelu",
    eps_field="layer_norm_eps",
    rms_eps=1e-12,
    tie_word_embeddings=True,
    names=NAMES,
)
ROBERTA = replace(
    BERT,
    architecture="RobertaModel",
    traits=_roberta_traits,
    head=fixed_head(HeadShape(dense="classifier.dense", out="classifier.out_proj")),
    masked_head=fixed_head(HeadShape(out="lm_head", dense="lm_head.dense", activation="gelu", norm="lm_head.layer_norm")),
)
XLM_ROBERTA = replace(ROBERTA, architecture="XLMRobertaModel")
CAMEMBERT = replace(ROBERTA, architecture="CamembertModel")
