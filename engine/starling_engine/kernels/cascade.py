"""Attention where all sequences begin with the same blocks: the shared keys are read for all queries at once.

Two passes (arXiv 2501.01005, section 3.1.2), merged by their LSE: all tokens over the prefix, as one prefill with nothing hidden,
and each sequence over its own keys. `attention_plan.cascade_pays` says when that is cheaper.
"""

from torch import Tensor

from starling_engine.kernels.attention_plan import decode_segments, decode_tiles, prefill_tiles, prefix_segments
from starling_engine.kernels.paged_attention import AttentionCall, AttentionScope, launch, sms
from starling_engine.kernels.split_attention import Partial, merge


def cascade_attention(call: AttentionCall, shared: int, max_query_len: int) -> Tensor:
    """Gives the same as `paged_attention`, where all sequences share their first `shared` keys, before all queries. No window."""
    assert not call.window and 0 < shared < call.longest
    shape, cores = call.shape, sms(call.q.device)
    wide = prefill_tiles(shape.head_dim, shape.itemsize)
    narrow = decode_tiles(shape.head_dim, shape.itemsize, max_query_len * call.group)
    first = prefix_segments(shape, shared, cores)
    rest = 1 if narrow is None else decode_segments(shape, call.longest - shared, cores)
    partial = Partial.empty(call.q, first + rest)
    launch(call, AttentionScope(prefix=shared), wide, partial, first)
    launch(call, AttentionScope(one_block=narrow is not None, suffix=shared), narrow or wide, partial, rest, segment_base=first)
    return merge(partial, call.q.dtype)
