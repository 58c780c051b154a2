"""Tables of the decisions that attention takes before it is launched."""

from dataclasses import replace

import numpy as np
import pytest
from starling_engine.kernels.attention_plan import (
    AttentionShape,
    QueryBlocks,
    cascade_pays,
    common_prefix,
    decode_segments,
    keys_saved,
    prefix_segments,
)

LLAMA_8B = AttentionShape(tokens=64, sequences=64, heads=32, kv_heads=8, head_dim=128, itemsize=2)


@pytest.mark.parametrize(
    ("tables", "computed", "shared"),
    [
        ([[3, 4, 5], [3, 4, 6]], [48, 48], 2),
        ([[3, 4, 5], [3, 4, 5]], [48, 48], 3),
        ([[3, 4, 5], [3, 4, 5]], [48, 31], 1),
        ([[3, 4, 5], [3, 4, 5]], [48, 15], 0),
        ([[3, 4, 5], [2, 4, 5]], [48, 48], 0),
        ([[3, 4, 5], [3, 7, 5], [3, 4, 5]], [48, 48, 48], 1),
        ([[3, 4, 5]], [48], 0),
        ([[3, 4, 5], [3, 4, 5]], [64, 64], 3),
    ],
)
def test_common_prefix(tables: list[list[int]], computed: list[int], shared: int) -> None:
    assert common_prefix(np.array(tables, dtype=np.int32), np.array(computed, dtype=np.int32), 16) == shared


@pytest.mark.parametrize(
    ("shape", "shared", "pays"),
    [
        (LLAMA_8B, 4096, True),
        (LLAMA_8B, 1024, True),
        (LLAMA_8B, 64, False),
        (LLAMA_8B, 0, False),
        (replace(LLAMA_8B, tokens=1, sequences=1), 4096, False),
        (replace(LLAMA_8B, tokens=2, sequences=2), 4096, False),
        (replace(LLAMA_8B, tokens=2, sequences=2), 1 << 16, True),
        (replace(LLAMA_8B, tokens=8192, sequences=2), 4096, False),
        (replace(LLAMA_8B, tokens=4, sequences=4), 2048, True),
        (replace(LLAMA_8B, tokens=4, sequences=4, row_bytes=128), 2048, False),
    ],
)
def test_cascade_pays_where_it_saves_more_bytes_than_it_adds(shape: AttentionShape, shared: int, pays: bool) -> None:
    assert cascade_pays(shape, shared, sms=132) == pays


def test_a_prefix_is_split_until_each_core_has_a_part() -> None:
    assert prefix_segments(LLAMA_8B, 1 << 16, sms=132) == 8, "128 programs are as good as one for each core"
    assert prefix_segments(LLAMA_8B, 1024, sms=132) == 4
    assert prefix_segments(replace(LLAMA_8B, tokens=8192), 1 << 16, sms=132) == 1


@pytest.mark.parametrize(("sequences", "segments"), [(1, 32), (16, 4), (32, 2), (33, 2), (34, 1), (64, 1), (256, 1)])
def test_a_context_is_split_only_where_that_fills_the_device(sequences: int, segments: int) -> None:
    """A step of 64 sequences runs 512 programs at once, of 528 that could: a merge would cost more than the rest is worth."""
    assert decode_segments(replace(LLAMA_8B, tokens=sequences, sequences=sequences), 8192, sms=132) == segments


@pytest.mark.parametrize(
    ("kv_heads", "sequences", "room", "saved"),
    [(8, 2, 257, 65536 - 2048), (8, 33, 257, 65536 - 32768), (8, 34, 257, 0), (1, 2, 257, 32768 - 1024), (8, 2, 5, 8192 - 2048)],
)
def test_a_step_of_few_rows_reads_fewer_keys_a_program_than_a_recording_with_room_for_more(
    kv_heads: int, sequences: int, room: int, saved: int
) -> None:
    assert keys_saved(65536, kv_heads, 1 << 17, sequences=sequences, room=room, sms=132) == saved


@pytest.mark.parametrize(
    ("lengths", "listed"),
    [
        ([70, 3, 33, 4, 5], [[0, 0], [0, 1], [0, 2], [2, 0], [2, 1], [4, 0]]),
        ([1, 4, 2], []),
        ([3], [[0, 0]]),
        ([64, 0], [[0, 0], [0, 1]]),
    ],
)
def test_query_blocks_are_those_of_prompts(lengths: list[int], listed: list[list[int]]) -> None:
    """Up to 4 tokens are a decode with drafts, beside which other tiles are for prompts; a sequence alone is one."""
    assert QueryBlocks.of(128, 2, 4) == QueryBlocks(tokens=32, short=4)
    assert QueryBlocks(32, 4).listed(np.array(lengths, np.int32)).tolist() == listed


def test_a_recorded_step_has_fewer_programs_for_prompts_than_rows_that_it_has_room_for() -> None:
    """Each block of Llama-3-8B with up to 256 requests, in 512 tokens, took a search, and rows without one ended behind it."""
    assert QueryBlocks.of(128, 2, 4).most(512, 257) == (512 + 102 * 31) // 32 < 512 // 32 + 257


def test_no_step_has_more_query_blocks_than_there_is_room_for() -> None:
    rng, most = np.random.default_rng(0), QueryBlocks(16, 2).most
    for _ in range(300):
        lengths = rng.choice([1, 2, 3, 16, 17, 40], rng.integers(1, 9)).astype(np.int32)
        listed, tokens = QueryBlocks(16, 2).listed(lengths), int(lengths.sum())
        assert len(listed) <= most(tokens, len(lengths)) <= most(tokens + 5, len(lengths) + 3) or len(lengths) == 1
