"""EuroBERT (arXiv 2503.05500): Llama's layers, whose tokens see each other in both directions."""

from dataclasses import replace

from starling_engine.model_config.classifier import HeadShape, fixed_head
from starling_engine.model_config.llama import LLAMA

EUROBERT = replace(
    LLAMA,
    architecture="EuroBertModel",
    causal=False,
    head=None,
    token_head=fixed_head(HeadShape()),
    rms_eps=1e-5,
    rope_theta=250_000.0,
)
