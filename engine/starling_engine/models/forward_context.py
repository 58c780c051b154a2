"""The arguments of a forward pass besides the tokens."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from starling_engine.kernels.attention_metadata import AttentionMetadata


def no_tick() -> None:
    """Does nothing, for callers whose progress nobody watches."""


@dataclass(slots=True)
class ForwardContext:
    """Cache and positions of one step, per layer. Valid for one forward pass.

    kv         [num_blocks, *page_shape] of each layer (see `kv/spec.py`); written by the pass
    attention  each layer's metadata; layers of one KV group share the object
    rows       [R] int64, the tokens whose hidden states are wanted, or None for all: past its attention, the last layer computes
               no others
    tick       called once a layer, so that a watcher sees progress inside a long step
    """

    kv: list[torch.Tensor]
    attention: list[AttentionMetadata]
    rows: torch.Tensor | None = None
    tick: Callable[[], None] = no_tick
