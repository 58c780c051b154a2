"""The launch plan of attention: pure functions of shapes, and of values that a captured graph keeps. Imports no triton.

A query block is BLOCK_M rows: tokens of one sequence times the query heads that share a key-value head (`group`, vLLM's
num_queries_per_kv). A program computes it, or one segment of its keys; on the device the program is a thread block (CTA).

    step      head x bytes     rows   keys   warps   stages   registers     CTAs an SM   shared
    prefill   up to 64 x 2      128     64       8        3         128              2    48 KB
    prefill   up to 128 x 2     128     32       8        3         128              2    64 KB
    prefill   256 x 2           128     32       8        3         254              1   128 KB
    prefill   512 x 2            64     16       8        3         255              1   128 KB
    prefill   any x 4            32     16       8        2          78              3    34 KB
    decode    up to 128 x 2   16-64     64       4        5     128-208           3, 2 70-77 KB
    decode    256 x 2         16-64     32       4        5         168              3    73 KB
    decode    512 x 2         16-64     16       8        5         122              2    81 KB
    decode    any x 4         16-32     32       8        2          54              4    42 KB

Registers a thread and shared memory a CTA are those of Triton 3.7 and ptxas for sm_90. Triton 3.6 needs as much, and 8 bytes of
stack for prompts in a cache of fp8. Heads of 512 have 80 bytes of stack in prompts.
Nothing here was timed on such a GPU.

Prefill: 128 rows are two warpgroups (wgmma), and read one byte of L2 for every 128 operations. Two CTAs an SM, so that one
multiplies while the other is at its softmax. With 64 keys, heads of 128 take 202 registers, and only one CTA fits.

Decode, with up to 7 drafts or without: entries of the block table are loaded ahead of their keys, so 5 stages are two tiles of
keys and values in flight. That is up to 64 KB a CTA; the memory's latency needs about 30 KB an SM. A cache in fp8 has the same
tiles. There decode takes up to 248 registers for the conversion, which leaves two CTAs an SM with 32 KB in flight each. In int8
and int4 it takes up to 255, and prompts have up to 32 bytes of stack.

fp32 is exact, without tensor cores: its tiles are small, so that they do not spill. Heads above 256 have 16 keys of decodes.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Lengths = TypeVar("Lengths", int, npt.NDArray[np.int32])

PROGRAMS_PER_SM = 4
"""Programs of a decode step for each SM. With fewer, the step waits for an SM that has one more than the others."""

SEGMENT_KEYS = 256
"""Fewest keys of a segment of the context: fewer save less than the reduction of one more segment costs."""

MAX_SEGMENTS = 64
"""The reduction holds as many at once."""

MIN_ROWS = 16
"""Fewest rows that tl.dot multiplies."""

MAX_DECODE_ROWS, MAX_DECODE_ROWS_FP32 = 64, 32
"""Most rows of a query block in the tiles for decode."""

LATENT_ROWS, LATENT_ROWS_FP32 = 64, 16
"""Most rows of a query block of latent attention, tokens times heads: those of Hopper's wgmma, or the fewest of tl.dot."""

MAX_GROUP = 32
"""Most query heads of a key-value head: a token of theirs is in one query block, of 32 rows where it is least."""

MAX_DECODE_TOKENS = 8
"""Tokens of a sequence that is bound by memory in any case: a decode with at most 7 drafts."""

MERGED_ROWS = 8
"""Most query heads for which the last program of a split decode merges its segments: with more, it would do the work of many."""

MERGED_NUMBERS = 8192
"""Numbers of other segments that it loads at once: 64 registers a thread, or 32 KiB."""

CASCADE_BYTES = 16 << 20
"""Fixed cost of cascade: two more launches, about 4 us, as bytes that memory delivers in that time."""


@dataclass(frozen=True)
class AttentionTiles:
    """Rows of a query block, keys that a program reads at once, and options for Triton."""

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None

    def tokens(self, group: int) -> int:
        """Returns the tokens of a query block."""
        return self.rows // group

    def blocks(self, tokens: int, group: int) -> int:
        """Returns the query blocks of a sequence of `tokens` tokens."""
        return -(-tokens // self.tokens(group))


def decode_tiles(head_dim: int, itemsize: int, group: int, tokens: int) -> AttentionTiles | None:
    """Returns the tiles for sequences of at most `tokens` tokens, where these are bound by memory; else None.

    Such a sequence is one query block, or several where its rows are too many. `itemsize` is that of queries, in bytes.
    """
    most = MAX_DECODE_ROWS if itemsize <= 2 else MAX_DECODE_ROWS_FP32
    if tokens > MAX_DECODE_TOKENS and tokens * group > most:
        return None
    rows = min(most, max(MIN_ROWS, 1 << (tokens * group - 1).bit_length()))
    if itemsize > 2:
        return AttentionTiles(rows, 32 if head_dim <= 256 else 16, 8, 2)
    if head_dim > 256:
        return AttentionTiles(rows, 16, 8, 5)
    return AttentionTiles(rows, 64 if head_dim <= 128 else 32, 4, 5)


def prefill_tiles(head_dim: int, itemsize: int) -> AttentionTiles:
    """Returns the tiles for all other sequences, which are bound by the tensor cores."""
    if itemsize > 2:
        return AttentionTiles(32, 16, 8, 2)
    if head_dim <= 64:
        return AttentionTiles(128, 64, 8, 3, 128)
    if head_dim > 256:
        return AttentionTiles(64, 16, 8, 3)
    return AttentionTiles(128, 32, 8, 3, 128) if head_dim <= 128 else AttentionTiles(128, 32, 8, 3)


@dataclass(frozen=True, slots=True)
class QueryBlocks:
    """Lists the query blocks of a step with prompts once for all layers: a program looks up its own, and searches for nothing.

    A query block has `tokens` tokens. Sequences of at most `short` tokens have none, for they fit in one block of the tiles for
    decode. One that is alone in a step has some, whatever its length. Steps whose sequences have at most `decodes` tokens need no
    list.
    """

    tokens: int
    short: int
    decodes: int = MAX_DECODE_TOKENS

    @classmethod
    def of(cls, head_dim: int, itemsize: int, group: int) -> "QueryBlocks":
        small = decode_tiles(head_dim, itemsize, group, 1)
        assert small is not None, "a single token is a decode"
        return cls(prefill_tiles(head_dim, itemsize).tokens(group), small.tokens(group))

    @classmethod
    def of_latents(cls, heads: int, itemsize: int) -> "QueryBlocks":
        """Returns those of latent attention, which has tiles of one kind: all sequences of a step have some."""
        rows = LATENT_ROWS if itemsize <= 2 else LATENT_ROWS_FP32
        return cls(max(1, rows >> (heads - 1).bit_length()), short=0, decodes=1)

    def shortest(self, sequences: int) -> int:
        """Returns the fewest tokens of a sequence that has query blocks."""
        return self.short + 1 if sequences > 1 else 1

    def of_length(self, lengths: Lengths) -> Lengths:
        """Returns the query blocks of a sequence of so many tokens, or of each."""
        return -(-lengths // self.tokens)

    def most(self, tokens: int, sequences: int) -> int:
        """Returns the most query blocks of a step of so many tokens. Each sequence may leave all but one token of a block empty."""
        sequences = min(sequences, tokens // self.shortest(sequences))
        return (tokens + sequences * (self.tokens - 1)) // self.tokens

    def listed(self, lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Returns [N, 2]: for each query block its sequence, and its number in it. `lengths` [S] are tokens of sequences."""
        counts = np.where(lengths >= self.shortest(len(lengths)), self.of_length(lengths), 0)
        sequences = np.repeat(np.arange(len(lengths)), counts)
        numbers = np.arange(len(sequences)) - np.repeat(counts.cumsum() - counts, counts)
        return np.stack((sequences, numbers), axis=1).astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Sizes of a step for one layer. `itemsize` is of queries, in bytes; `row_bytes` is of a cached row, if its type differs."""

    tokens: int
    sequences: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    row_bytes: int | None = None

    @property
    def group(self) -> int:
        """Query heads of a key-value head."""
        return self.heads // self.kv_heads


def decode_segments(shape: AttentionShape, longest: int, sms: int) -> int:
    """Returns how many segments to split each context into, in the tiles for decode.

    `longest` is the longest possible context.
    """
    return _segments(shape.sequences * shape.kv_heads, longest, PROGRAMS_PER_SM * sms)


def merged_at_once(group: int, head_dim: int) -> int:
    """Returns how many segments the last program of a split decode merges at a time; 0 where a launch of its own does."""
    rows, columns = (1 << (each - 1).bit_length() for each in (group, head_dim))
    return min(MAX_SEGMENTS, MERGED_NUMBERS // (rows * columns)) if rows <= MERGED_ROWS else 0


def keys_saved(context: int, kv_heads: int, longest: int, *, sequences: int, room: int, sms: int) -> int:
    """Returns the keys that a program for a decode beside a prompt need not read, since its step is no recorded one.

    A step splits its contexts by its own `sequences`, and a recorded one by all for which it has `room`. `context` is the decode's,
    and `longest` the longest possible one.
    """
    own, recorded = (_segments(count * kv_heads, longest, PROGRAMS_PER_SM * sms) for count in (sequences, room))
    return -(-context // recorded) - -(-context // own)


def prefix_segments(shape: AttentionShape, prefix_len: int, sms: int) -> int:
    """Returns how many segments a common prefix is split into. It is computed in tiles for prefill: an SM holds one at a time."""
    return _segments(_prefix_blocks(shape) * shape.kv_heads, prefix_len, sms)


def _segments(programs: int, longest: int, wanted: int) -> int:
    """Returns the largest power of two that turns `programs` into `wanted` at most, or fewer where there are not enough keys.

    With more than `wanted`, the last of them would run when the others are done, and partial results have to be merged for nothing.

    The longest possible context decides, not the step's own: a captured graph serves both. A segment finds its bounds on the
    device.
    """
    segments = 1
    while segments < MAX_SEGMENTS and 2 * programs * segments <= wanted and longest >= 2 * segments * SEGMENT_KEYS:
        segments *= 2
    return segments


def _prefix_blocks(shape: AttentionShape) -> int:
    return -(-shape.tokens // prefill_tiles(shape.head_dim, shape.itemsize).tokens(shape.group))


def common_prefix(block_tables: npt.NDArray[np.int32], num_computed: npt.NDArray[np.int32], block_size: int) -> int:
    """Counts the leading blocks of [S, max_blocks] that all sequences share and that are full. 0 for one sequence.

    `num_computed` [S] counts each sequence's tokens in the cache before the step. All queries come after these, so they see all
    keys of the blocks.
    """
    if len(block_tables) < 2:
        return 0
    full = min(int(num_computed.min()) // block_size, block_tables.shape[1])
    differs = (block_tables[1:, :full] != block_tables[0, :full]).any(0)
    return int(differs.argmax()) if differs.any() else full


def cascade_pays(shape: AttentionShape, prefix_len: int, sms: int) -> bool:
    """Returns whether it is cheaper to attend to a common prefix apart, for all sequences at once (cascade attention).

    Then the prefix's keys are read once for each query block of the prefix, instead of once a sequence. In return each query writes
    and reads a partial result (fp32) for every segment of the prefix, and one more for the keys that follow.
    """
    if not prefix_len or shape.sequences < 2:
        return False
    token_bytes = 2 * shape.kv_heads * (shape.row_bytes or shape.head_dim * shape.itemsize)
    saved = prefix_len * token_bytes * (shape.sequences - _prefix_blocks(shape))
    partial = 2 * shape.tokens * shape.heads * shape.head_dim * 4 * (prefix_segments(shape, prefix_len, sms) + 1)
    return saved > partial + CASCADE_BYTES
