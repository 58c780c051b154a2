"""The form of a block in one layer of the KV cache (vLLM calls that a page).

Layers of equal spec form a KV group with its own block tables; all groups take blocks of equal bytes from one pool.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Keys and values of every token of a sequence (full attention).

    A block of one layer is [2, num_kv_heads, block_size, row_size] of `dtype_bytes` each (keys first). A row is what one head
    caches of a token: as many elements as it has dimensions, or their codes and scales (`native/cache_rows.py`).
    """

    block_size: int
    num_kv_heads: int
    row_size: int
    dtype_bytes: int

    @property
    def layer_block_shape(self) -> tuple[int, ...]:
        """Shape of a block in this layer, in elements."""
        return (2, self.num_kv_heads, self.block_size, self.row_size)

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of a block in this layer alone."""
        return math.prod(self.layer_block_shape) * self.dtype_bytes

    @property
    def window(self) -> int:
        """Tokens that a query sees, itself included; 0 means all."""
        return 0

    def first_needed_block(self, num_computed: int) -> int:  # noqa: ARG002 - full attention reads all, wherever it stands
        """Returns the first logical block that the token at position `num_computed` or a later one can read."""
        return 0


@dataclass(frozen=True, slots=True)
class WindowSpec(KVSpec):
    """Keys and values of the last `sliding_window` tokens; older blocks are freed while the request runs."""

    sliding_window: int = 0

    @property
    def window(self) -> int:
        return self.sliding_window

    def first_needed_block(self, num_computed: int) -> int:
        return max(0, num_computed - self.sliding_window + 1) // self.block_size


@dataclass(frozen=True, slots=True)
class LatentSpec(KVSpec):
    """A latent of every token of a sequence, from which all heads make their keys and values (arXiv 2405.04434, section 2.1).

    `num_kv_heads` is 1 and `row_size` kv_lora_rank + rope_dim. A block of one layer is [block_size, row_size], a token's row

        | compressed keys and values, normalised (kv_lora_rank) | the heads' common key part, rotated (rope_dim) |
    """

    @property
    def layer_block_shape(self) -> tuple[int, ...]:
        return (self.block_size, self.row_size)


@dataclass(frozen=True, slots=True)
class KVGroup:
    """The layers that share one block table; `layers[i]` has its part of each block in the pool's storage tensor i."""

    spec: KVSpec
    layers: tuple[int, ...]


def peak_blocks(groups: Sequence[KVGroup], num_tokens: int, max_in_flight: int) -> int:
    """Returns the blocks of a sequence of `num_tokens` at its peak, over all groups, with `max_in_flight` in steps at once."""
    logical = -(-num_tokens // groups[0].spec.block_size)
    peak = 0
    for group in groups:
        window = group.spec.window
        peak += min(logical, -(-(window + max_in_flight) // group.spec.block_size) + 1) if window else logical
    return peak


def group_layers(specs: list[KVSpec]) -> list[KVGroup]:
    """Groups layers by spec into groups of at most `size` layers, where `size` is the smallest number of layers of one kind.

    A block has `size` times layer_block_bytes in every group, so any block can serve any group. A last, shorter group leaves the
    rest of its blocks unused. Raises ValueError if two kinds differ in layer_block_bytes.
    """
    kinds: dict[KVSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        kinds.setdefault(spec, []).append(layer)
    if len({spec.layer_block_bytes for spec in kinds}) > 1:
        raise ValueError(f"layers need blocks of different sizes: {sorted({s.layer_block_bytes for s in kinds})} bytes")
    size = min(len(layers) for layers in kinds.values())
    return [KVGroup(spec, tuple(layers[at : at + size])) for spec, layers in kinds.items() for at in range(0, len(layers), size)]
