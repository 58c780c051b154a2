"""DeBERTa 2 and 3 (arXiv 2006.03654, 2111.09543): BERT whose queries and keys are compared with embeddings of distances, too.

The large models of 2, with a convolution behind the first layer, are refused.
"""

from dataclasses import replace

from starling_engine.errors import UnsupportedModel
from starling_engine.model_config.bert import BERT, TRAITS
from starling_engine.model_config.classifier import HeadShape
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.traits import DistanceEmbeddings, Traits

MAX_DISTANCES = 1 << 16
NAMES = replace(
    BERT.names,
    q="attention.self.query_proj",
    k="attention.self.key_proj",
    v="attention.self.value_proj",
    left_out=(*BERT.names.left_out, "embeddings.position_embeddings.", "lm_predictions.", "mask_predictions."),
)


def _traits(config: Fields) -> Traits:
    """Reads the traits. Scores are sums of three products: of both, and of either with an embedding of the distance."""
    for name in ("relative_attention", "share_att_key"):
        if not config.boolean(name, False):
            raise UnsupportedModel(f"{config.source}: {name}: false is not supported; supported: true")
    _check(config)
    hidden_size, rows = config.integer("hidden_size"), config.integer("type_vocab_size", 0, low=0, high=1 << 16)
    return replace(
        TRAITS,
        positions_from=0 if config.boolean("position_biased_input", True) else None,
        token_types=rows,
        attention_scale=(3 * hidden_size / config.integer("num_attention_heads")) ** -0.5,
        distances=_distances(config),
    )


def _check(config: Fields) -> None:
    """Raises for what no published model has, or those of 2 alone have."""
    written = config.get("pos_att_type")
    kinds = written if isinstance(written, list) else str(written).lower().split("|")
    if {str(kind).strip() for kind in kinds} != {"c2p", "p2c"}:
        raise UnsupportedModel(f"{config.source}: pos_att_type {written!r} is not supported; supported: p2c|c2p")
    if config.integer("conv_kernel_size", 0, low=0):
        raise UnsupportedModel(f"{config.source}: conv_kernel_size above 0 (DeBERTa 2) is not supported")
    for name in ("embedding_size", "pooler_hidden_size"):
        if config.integer(name, config.integer("hidden_size")) != config.integer("hidden_size"):
            raise config.error(name, "must be hidden_size: another width is not supported")


def _distances(config: Fields) -> DistanceEmbeddings:
    longest = config.integer("max_relative_positions", -1, low=-1, high=MAX_DISTANCES)
    longest = longest if longest > 0 else config.integer("max_position_embeddings", high=MAX_DISTANCES)
    buckets = config.integer("position_buckets", -1, low=-1, high=MAX_DISTANCES)
    if buckets > 0 and not 4 <= buckets < 2 * (longest - 1):
        raise config.error("position_buckets", f"must be at least 4, and less than twice the longest distance ({longest - 1})")
    norms = {each.strip() for each in config.text("norm_rel_ebd", "none").lower().split("|")}
    return DistanceEmbeddings(buckets if buckets > 0 else longest, buckets > 0, longest, "layer_norm" in norms)


def _head(config: Fields) -> HeadShape:
    return HeadShape(dense="pooler.dense", activation=config.one_of("pooler_hidden_act", "gelu", "tanh"))


DEBERTA_V2 = replace(BERT, architecture="DebertaV2Model", traits=_traits, head=_head, masked_head=None, rms_eps=1e-7, names=NAMES)
