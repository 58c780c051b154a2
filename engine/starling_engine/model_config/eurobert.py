"""EuroBERT (arXiv 2503.05500): Llama's layers, whose tokens see each other in both directions."""

from dataclasses import replace

from starling_engine.model_config.classifier import HeadPooling, HeadShape, fixed_head
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.llama import LLAMA

_POOLING: dict[str, HeadPooling] = {"late": "late", "bos": "cls", "mean": "mean"}


def _head(config: Fields) -> HeadShape:
    pooling = config.one_of("classifier_pooling", *_POOLING)
    return HeadShape(dense="dense", activation="gelu", pooling=_POOLING[pooling])


EUROBERT = replace(
    LLAMA,
    architecture="EuroBertModel",
    causal=False,
    head=_head,
    token_head=fixed_head(HeadShape()),
    rms_eps=1e-5,
    rope_theta=250_000.0,
)
