"""EuroBERT (arXiv 2503.05500): Llama's layers, whose tokens see each other in both directions."""

from dataclasses import replace

from starling_engine.errors import UnsupportedModel
from starling_engine.model_config.classifier import HeadShape, PoolingType, fixed_head
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.llama import LLAMA

_POOLING: dict[str, PoolingType] = {"bos": "cls", "mean": "mean"}


def _head(config: Fields) -> HeadShape:
    """Returns the head of a pooled state. Logits that are pooled in its place, which is the default, are not supported."""
    pooling = config.text("classifier_pooling", "late")
    if pooling not in _POOLING:
        why = f"classifier_pooling {pooling!r} is not supported; supported: {', '.join(_POOLING)}"
        raise UnsupportedModel(f"{config.source}: {why}")
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
