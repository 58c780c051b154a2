"""The form of a block in one layer of the KV cache (vLLM calls that a page).

Layers of equal spec form KV groups with block tables of their own; all groups take their blocks from one pool. A block is a slab of
as many bytes as the largest group needs: a group has its layers one behind the other in it, from the slab's start.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate


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
    def planes(self) -> int:
        """Parts of a block in this layer: keys and values."""
        return 2

    @property
    def window(self) -> int:
        """Tokens that a query sees, itself included; 0 means all."""
        return 0

    def first_needed_block(self, num_computed: int) -> int:  # noqa: ARG002 - full attention reads all, wherever it stands
        """Returns the first logical block that the token at position `num_computed` or a later one can read."""
        return 0

    def leaves_at(self, block: int) -> int:  # noqa: ARG002 - no block ever does
        """Returns the position from which on no token can read a logical block."""
        return sys.maxsize

    def longest_hit(self, cached: bytes) -> int:
        """Returns of how many leading blocks a next token finds all that it reads. In `cached` bytes of 1 are those that are there.

        No Python loop goes over the blocks: a prompt may have thousands.
        """
        return len(cached) - len(cached.lstrip(b"\1"))


@dataclass(frozen=True, slots=True)
class WindowSpec(KVSpec):
    """Keys and values of the last `sliding_window` tokens; older blocks are freed while the request runs."""

    sliding_window: int = 0

    @property
    def window(self) -> int:
        return self.sliding_window

    def first_needed_block(self, num_computed: int) -> int:
        return max(0, num_computed - self.sliding_window + 1) // self.block_size

    def leaves_at(self, block: int) -> int:
        return (block + 1) * self.block_size + self.sliding_window - 1

    def longest_hit(self, cached: bytes) -> int:
        needed = -(-(self.sliding_window - 1) // self.block_size)
        at = cached.rfind(b"\1" * needed)
        return at + needed if at >= 0 else len(cached) - len(cached.lstrip(b"\1"))


@dataclass(frozen=True, slots=True)
class ChunkedLocalSpec(KVSpec):
    """Keys and values of the last attention chunk of a sequence: queries of it see no token before (Llama 4).

    It has `attention_chunk` tokens, which are whole blocks. Blocks of earlier ones are freed while the request runs. No row of a
    step goes over its end.
    """

    attention_chunk: int = 0

    @property
    def window(self) -> int:
        return self.attention_chunk

    def first_needed_block(self, num_computed: int) -> int:
        return num_computed // self.attention_chunk * self.attention_chunk // self.block_size

    def leaves_at(self, block: int) -> int:
        return (block * self.block_size // self.attention_chunk + 1) * self.attention_chunk

    def longest_hit(self, cached: bytes) -> int:
        whole = len(cached) * self.block_size // self.attention_chunk * self.attention_chunk // self.block_size
        last = cached[whole:]
        return whole + len(last) - len(last.lstrip(b"\1"))


@dataclass(frozen=True, slots=True)
class RowsSpec(KVSpec):
    """Rows that are not parted into keys and values, of all heads together. A block of one layer is [block_size, row_size]."""

    @property
    def layer_block_shape(self) -> tuple[int, ...]:
        return (self.block_size, self.row_size)

    @property
    def planes(self) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class LatentSpec(RowsSpec):
    """A latent of every token of a sequence, from which all heads make their keys and values (arXiv 2405.04434, section 2.1).

    `num_kv_heads` is 1 and `row_size` kv_lora_rank + rope_dim, and the indexer's head_dim in a model with one. A block of one layer
    is [block_size, row_size], a token's row

        | compressed keys and values, normalised (kv_lora_rank) | the heads' common key part, rotated (rope_dim) | index key |

    Layers that share another one's choice have rows of that size, too, whose index key nobody writes or reads: a group of their own
    would take more than that.
    """


@dataclass(frozen=True, slots=True)
class WindowRowsSpec(RowsSpec, WindowSpec):
    """Rows of the last `sliding_window` tokens, of a layer that compresses runs of tokens. A block of it is [block_size, row_size].

    A row has a token's key, which is its value, too, and what its run is compressed of. The window covers what attention sees, and
    the tokens of a run that is not complete, with those of the run before where runs overlap.
    """


@dataclass(frozen=True, slots=True)
class RunSpec(RowsSpec):
    """Entries of all complete runs of `rate` tokens of a sequence, of a layer that has rows of a window beside them.

    A block of one layer is [entries, row_size]: an entry lies in the block of its run's last token. Blocks that are shorter than a
    run have room for one, and most of them leave it unused.
    """

    rate: int = 1

    @property
    def entries(self) -> int:
        """Entries that a block has room for."""
        return max(1, self.block_size // self.rate)

    @property
    def layer_block_shape(self) -> tuple[int, ...]:
        return (self.entries, self.row_size)


@dataclass(frozen=True, slots=True)
class StatePart:
    """Rows of a layer's recurrent state, each of `shape` in fp32. A row lies in one block: kernels find it in one piece."""

    rows: int
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * 4


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The recurrent state of a layer: as many bytes at any length of the sequence.

    A sequence has the blocks of its state from its start to its end, whatever its length. A copy of them, a snapshot, is its state
    at one length.
    """

    parts: tuple[StatePart, ...]

    @property
    def largest_row_bytes(self) -> int:
        return max(part.row_bytes for part in self.parts)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's state."""
        return sum(part.rows * part.row_bytes for part in self.parts)

    def columns(self, num_layers: int, slab_bytes: int) -> list[int]:
        """Returns where each part's blocks begin in a block table, and the number of all blocks, for so many layers."""
        blocks = (-(-num_layers * part.rows // (slab_bytes // part.row_bytes)) for part in self.parts)
        return list(accumulate(blocks, initial=0))


@dataclass(frozen=True, slots=True)
class StateGroup:
    """The layers that have a recurrent state. Their block table comes behind those of the KV groups.

    It has `num_blocks` blocks: as many on every rank, though some may need fewer. Its snapshots are at lengths of whole blocks of
    `block_size` tokens, as KV groups have them.
    """

    spec: StateSpec
    layers: tuple[int, ...]
    num_blocks: int
    block_size: int


def pieces_of(state: StateGroup, most: int) -> list[int]:
    """Returns the blocks of each piece of a snapshot, where a piece has `most` at most: that is how tiers keep it."""
    return [min(most, state.num_blocks - first) for first in range(0, state.num_blocks, most)]


@dataclass(frozen=True, slots=True)
class KVGroup:
    """The layers that share one block table, in the order in which they lie in a slab.

    `readers` are pairs of a layer that caches nothing, and the one of these whose keys and values it reads.
    """

    spec: KVSpec
    layers: tuple[int, ...]
    readers: tuple[tuple[int, int], ...] = ()

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all of these layers."""
        return len(self.layers) * self.spec.layer_block_bytes


SLAB_ALIGNMENT = 64
"""Bytes, a cache line. Slabs have whole ones, so that a slab can be viewed as numbers of any type."""


STATE_SLABS = 32
"""Slabs that a state is cut into where there are no keys and values by which they are measured.

Each part of a state leaves less than one of them unused, and each costs a copy when a snapshot is made.
"""


def slab_bytes(groups: Sequence[KVGroup], state: StateSpec | None = None, num_state_layers: int = 0) -> int:
    """Returns the bytes of a slab, which holds a block of any group, or a row of a state. 0 for a model that caches nothing.

    Of a model that has a state alone it is a share of the state of `num_state_layers`, in whole rows of its largest part.
    """
    most = max((group.block_bytes for group in groups), default=0)
    if state is not None:
        most = max(most, state.largest_row_bytes)
        if not groups:
            row = max(state.parts, key=lambda part: part.rows * part.row_bytes).row_bytes
            most = max(most, -(-num_state_layers * state.layer_bytes // (STATE_SLABS * row)) * row)
    return -(-most // SLAB_ALIGNMENT) * SLAB_ALIGNMENT


def peak_blocks(groups: Sequence[KVGroup], num_tokens: int, max_in_flight: int) -> int:
    """Returns the blocks of a sequence of `num_tokens` at its peak, over all groups, with `max_in_flight` in steps at once."""
    peak = 0
    for group in groups:
        logical = -(-num_tokens // group.spec.block_size)
        window = group.spec.window
        peak += min(logical, -(-(window + max_in_flight) // group.spec.block_size) + 1) if window else logical
    return peak


def group_layers(
    specs: Mapping[int, KVSpec], runs: Mapping[int, RunSpec] | None = None, readers: Mapping[int, int] | None = None
) -> list[KVGroup]:
    """Groups layers by spec into groups of as many layers as fit into a slab; `specs` has the layers by their index.

    Layers that compress runs of tokens are in a second group each, by their specs in `runs`. `readers` are layers that read the
    keys and values of another one.

    A slab has room for all layers of one kind: of the one that needs least. It has room for any one layer, too. What a group does
    not fill of its slabs stays unused.
    """
    kinds: dict[KVSpec, list[int]] = {}
    for layer, spec in (*specs.items(), *(runs or {}).items()):
        kinds.setdefault(spec, []).append(layer)
    room = max(
        min((len(layers) * spec.layer_block_bytes for spec, layers in kinds.items()), default=0),
        max((spec.layer_block_bytes for spec in kinds), default=0),
    )
    groups = []
    for spec, layers in kinds.items():
        size = room // spec.layer_block_bytes
        groups += [KVGroup(spec, tuple(layers[at : at + size])) for at in range(0, len(layers), size)]
    pairs = (readers or {}).items()
    return [replace(group, readers=tuple(pair for pair in pairs if pair[1] in group.layers)) for group in groups]
