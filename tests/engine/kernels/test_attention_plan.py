"""Tables of the decisions that attention takes before it is launched."""

from dataclasses import replace

import numpy as np
import pytest
from starling_engine.kernels.attention_plan import AttentionShape, cascade_pays, common_prefix, decode_segments, prefix_segments

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
