"""ELECTRA (arXiv 2003.10555), its discriminators: BERT with another head. Embeddings of another width (small) are refused."""

from dataclasses import replace

from starling_engine.model_config.bert import BERT, bert_traits
from starling_engine.model_config.classifier import HeadShape, fixed_head
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.traits import Traits


def _traits(config: Fields) -> Traits:
    if config.integer("embedding_size", 128) != config.integer("hidden_size"):
        raise config.error("embedding_size", "must be hidden_size: embeddings of another width are not supported")
    return bert_traits(config)


ELECTRA = replace(
    BERT,
    architecture="ElectraModel",
    traits=_traits,
    head=fixed_head(HeadShape(dense="classifier.dense", out="classifier.out_proj", activation="gelu")),
    masked_head=None,
    names=replace(BERT.names, left_out=("classifier.", "discriminator_predictions.", "generator_")),
)
