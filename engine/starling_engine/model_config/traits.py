"""Traits: all that layers of a decoder have in common."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Streams:
    """Residual streams of a model that has several (manifold-constrained hyper-connections, DeepSeek-V4).

    count       of the streams
    iterations  that make the matrix by which they are mixed doubly stochastic (Sinkhorn and Knopp)
    eps         added to its sums, and to the weights by which streams become one
    """

    count: int
    iterations: int
    eps: float


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The inputs that each layer gets of a token beside the stream (Gemma 4): `size` elements, of the token's id and embedding.

    The table of ids has `rows` rows.
    """

    size: int
    rows: int


@dataclass(frozen=True, slots=True)
class DistanceEmbeddings:
    """Embeddings of distances, which queries and keys are compared with, too (DeBERTa, arXiv 2006.03654, section 3.1).

    span     rows for distances to tokens before, and as many to those behind
    buckets  distances share rows by their logarithm; else each has one
    longest  distance that has a row of its own
    normed   a norm of the embeddings
    """

    span: int
    buckets: bool
    longest: int
    normed: bool


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The small differences between families; the defaults are Llama's.

    qkv_bias, o_bias     biases of the attention's projections (with latents qkv_bias: of those that compress)
    attention_gate       what attention gives is multiplied by the sigmoid of a gate: of each element, or one of each head
    mlp_bias             biases of the MLP's projections
    down_bias            the same of the MLP's output alone; None: as `mlp_bias`
    mlp_gate             the activation is of a gate, which is multiplied with up; else it is of up
    head_bias            a bias of the logits head
    qk_norm              RMSNorm of queries and keys: before rotation of each head, or over the whole width of all heads; or of each
                         head that is rotated already (Hunyuan); or of each, without a weight, in layers that rotate (Llama 4)
    value_norm           RMSNorm of each head's values, without a weight
    layer_inputs         of layers that get more of a token than the stream; None: they do not
    layer_scalar         a learnt number of each layer, which multiplies the residual stream behind it
    positions_from       row of a table of learnt positions that the first token takes; None: there is no table
    positions_counted    the longest sequence of a config counts the rows before that one, too
    token_types          rows of a table of segments, of which each token takes one; 0: there is no table
    embedding_norm       a norm of embeddings
    final_norm           a norm behind the last layer
    norm                 kind of all norms: RMSNorm by a weight, by one in fp32 (Gemma 4), by 1 + weight in fp32 (Gemma), or
                         LayerNorm without a bias, with one, or with one and by 1 + weight (Nemotron)
    attention_sinks      a learnt score of each head in the softmax's denominator alone (see `AttentionWeights`)
    distance_buckets     rows of a table of biases that scores get by the distance of their tokens; 0: there is none
    distances            of a model whose scores depend on embeddings of distances; None: they do not
    paired_rope          the checkpoint's heads rotate neighbouring elements with one another, not halves
    attention_scale      multiplies scores before the softmax; None: head_dim ** -0.5
    attention_cap        scores become cap * tanh(score / cap); 0: they do not
    logit_cap            the same for logits
    logit_divisor        divides logits
    embedding_scale      multiplies embeddings, rounded to the model's dtype
    residual_scale       multiplies what attention and feed-forward add to the residual stream
    attention_in_scale   multiplies the input of attention that has Mamba-2 beside it (Falcon-H1)
    attention_out_scale  multiplies what such attention gives
    mlp_gate_scale       multiplies an MLP's gate before the activation (Falcon-H1)
    mlp_out_scale        multiplies what an MLP gives
    streams              of a model with several; None: there is one, to which all parts are added
    num_draft_layers     layers for drafts that a checkpoint may hold behind the last one; not loaded
    """

    qkv_bias: bool = False
    o_bias: bool = False
    attention_gate: Literal["element", "head"] | None = None
    mlp_bias: bool = False
    down_bias: bool | None = None
    mlp_gate: bool = True
    head_bias: bool = False
    qk_norm: Literal["head", "head without weight", "width", "rotated head"] | None = None
    value_norm: bool = False
    layer_inputs: LayerInputs | None = None
    layer_scalar: bool = False
    positions_from: int | None = None
    positions_counted: bool = True
    token_types: int = 0
    embedding_norm: bool = False
    final_norm: bool = True
    norm: Literal["weight", "wide weight", "one plus weight", "layer", "biased layer", "biased layer, one plus weight"] = "weight"
    attention_sinks: bool = False
    distance_buckets: int = 0
    distances: DistanceEmbeddings | None = None
    paired_rope: bool = False
    attention_scale: float | None = None
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    logit_divisor: float = 1.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    attention_in_scale: float = 1.0
    attention_out_scale: float = 1.0
    mlp_gate_scale: float = 1.0
    mlp_out_scale: float = 1.0
    streams: Streams | None = None
    num_draft_layers: int = 0
