"""MPNet (arXiv 2004.09297): RoBERTa without segments, with a bias of each head by the distance of two tokens."""

from dataclasses import replace

from starling_engine.model_config.bert import NAMES, ROBERTA, TRAITS
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.traits import Traits

FIRST_POSITION = 2
"""Row of the table of positions: those before it belong to tokens that fill a batch up."""


def _traits(config: Fields) -> Traits:
    buckets = config.integer("relative_attention_num_buckets", 32, low=4, high=1 << 16)
    return replace(TRAITS, positions_from=FIRST_POSITION, distance_buckets=buckets)


MPNET = replace(
    ROBERTA,
    architecture="MPNetModel",
    traits=_traits,
    rms_eps=1e-12,
    names=replace(
        NAMES,
        q="attention.attn.q",
        k="attention.attn.k",
        v="attention.attn.v",
        o="attention.attn.o",
        attention_out_norm="attention.LayerNorm",
    ),
)
