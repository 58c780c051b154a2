"""The description of one decoder layer, in what the layers of a model may differ."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Mixer = Literal[
    "attention",
    "gated delta net",
    "kimi delta attention",
    "mamba2",
    "attention and mamba2",
    "mamba",
    "short convolution",
    "none",
]
FeedForward = Literal["mlp", "experts", "mlp and experts", "none"]
Norms = Literal["before", "after", "both", "parallel", "parallel, each its own", "sum", "before feed-forward"]


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries are multiplied by 1 + `scale` * ln(1 + floor((position + `first`) / `step`)) (arXiv 2501.19399, section 2.2).

    first  the number that a sequence's first token counts as: 1 or 0
    """

    step: int
    scale: float
    first: int = 1


@dataclass(frozen=True, slots=True)
class KVHeads:
    """Key-value heads of a layer: how many, and the elements of each, which queries have as many of."""

    count: int
    dim: int


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of `rate` tokens each that a layer compresses to one entry, which its queries see once the run is complete.

    With `indexed` an entry is made of the run before, too, and an indexer chooses the entries that a query attends to.
    """

    rate: int
    indexed: bool = False

    @property
    def span(self) -> int:
        """Tokens that an entry is made of."""
        return self.rate * (2 if self.indexed else 1)


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One layer: a mixer of tokens, then a feed-forward part, both added to one residual stream. It may have one of them alone.

    mixer         attention, or what has a state: `ModelConfig.gated_delta`, of which Kimi Delta Attention is a kind, `mamba`,
                  `mamba2`, or `short_conv`; or attention and Mamba-2 side by side, whose results are added up; what follows about
                  queries is of attention alone
    window        tokens that a query sees, itself included; 0 means all. Where tokens see each other in both directions, it is so
                  many on each side
    attention_chunk  tokens of an attention chunk: a sequence is cut into such, and a query sees none before its own; 0 means all
    rope          index of the rotary embedding in `ModelConfig.ropes`; None: queries and keys are not rotated (NoPE)
    norms         what both parts have: a norm of their input, one of their output before it is added, or both of them;
                  "parallel": one norm, whose output attention and feed-forward take, and add to the stream together; or each
                  has a norm of its own;
                  "sum": one of the stream, once their output is added (arXiv 1706.03762, section 3.1);
                  "before feed-forward": none of attention's input, which is normed already
    temperature   of queries, where it depends on their position
    runs          what it compresses of tokens that its queries do not see any more, with `ModelConfig.compressed`; None: nothing
    kv_heads      of a layer that has others than the model's; None: it has these
    keys_are_values  what the key's matrix gives is the value, too: the checkpoint has no matrix for it
    cache_of      index of the layer whose keys and values it reads, for it has none of its own; None: it has
    mlp_size      width of its plain MLP, where that is not the model's
    shares_choice the layer has no indexer, and attends to the tokens that the last one before it chose
    feed_forward  a plain MLP, or `ModelConfig.moe`, or both side by side

    A layer that has a mixer or a feed-forward part alone has its norm before it.
    """

    mixer: Mixer = "attention"
    window: int = 0
    attention_chunk: int = 0
    rope: int | None = 0
    norms: Norms = "before"
    feed_forward: FeedForward = "mlp"
    temperature: Temperature | None = None
    shares_choice: bool = False
    runs: Runs | None = None
    kv_heads: KVHeads | None = None
    keys_are_values: bool = False
    cache_of: int | None = None
    mlp_size: int | None = None

    @property
    def has_state(self) -> bool:
        """Says if the layer has a state of a size that does not depend on the sequence's length."""
        return self.mixer not in ("attention", "none")

    @property
    def attends(self) -> bool:
        """Says if the layer has keys and values."""
        return self.mixer in ("attention", "attention and mamba2")


def with_windows(windows: Iterable[int], norms: Norms = "before") -> tuple[LayerConfig, ...]:
    """Returns layers that differ in their windows alone."""
    return tuple(LayerConfig(window=window, norms=norms) for window in windows)
