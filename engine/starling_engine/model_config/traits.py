"""Traits: all that layers of a decoder have in common."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The small differences between families; the defaults are Llama's.

    qkv_bias, o_bias     biases of the attention's projections (with latents qkv_bias: of those that compress)
    mlp_bias             biases of the MLP's projections
    mlp_gate             the activation is of a gate, which is multiplied with up; else it is of up
    head_bias            a bias of the logits head
    qk_norm              RMSNorm of queries and keys: before rotation of each head, or over the whole width of all heads; or of each
                         head that is rotated already (Hunyuan)
    norm                 kind of all norms: RMSNorm by a weight, by 1 + weight in fp32 (Gemma), or LayerNorm without a bias,
                         with one, or with one and by 1 + weight (Nemotron)
    attention_sinks      a learnt score of each head in the softmax's denominator alone (see `AttentionWeights`)
    paired_rope          the checkpoint's heads rotate neighbouring elements with one another, not halves
    attention_scale      multiplies scores before the softmax; None: head_dim ** -0.5
    attention_cap        scores become cap * tanh(score / cap); 0: they do not
    logit_cap            the same for logits
    logit_divisor        divides logits
    embedding_scale      multiplies embeddings, rounded to the model's dtype
    residual_scale       multiplies what attention and feed-forward add to the residual stream
    num_draft_layers     layers for drafts that a checkpoint may hold behind the last one; not loaded
    """

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    mlp_gate: bool = True
    head_bias: bool = False
    qk_norm: Literal["head", "width", "rotated head"] | None = None
    norm: Literal["weight", "one plus weight", "layer", "biased layer", "biased layer, one plus weight"] = "weight"
    attention_sinks: bool = False
    paired_rope: bool = False
    attention_scale: float | None = None
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    logit_divisor: float = 1.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    num_draft_layers: int = 0
