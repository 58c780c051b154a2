"""Recordings of native kernels: a replay does what the calls did, with whatever lies at their addresses by then."""

import re
import threading
from collections.abc import Callable

import pytest
import torch
from starling_engine.native import load, ops, quantized_ops
from starling_engine.native.bindings import library, loaded
from starling_engine.native.group_quantized import INT4, quantize
from starling_engine.native.recording import NotRecordable, Scratch, record
from torch import Tensor

pytestmark = pytest.mark.skipif(load() is None, reason="this machine has no native kernels")

BF16 = torch.bfloat16


def test_a_replay_computes_anew() -> None:
    """The numbers of a scale and of an epsilon are passed as they are."""
    packed = quantized_ops.pack_quantized(quantize(torch.randn(64, 64).to(BF16), INT4))
    plain, norm = ops.pack_linear(torch.randn(96, 64).to(BF16)), torch.rand(64).to(BF16)
    kv, tables = torch.randn(4, 2, 1, 8, 32).to(BF16), torch.tensor([[2, 1]], dtype=torch.int32)
    start, context = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([11], dtype=torch.int32)
    x, sinks = torch.randn(1, 64).to(BF16), torch.randn(3)

    def work() -> tuple[Tensor, Tensor]:
        unit = torch.empty_like(x)
        ops.rms_norm(x, norm, 0.25, unit)
        q = ops.linear(quantized_ops.quantized_linear(unit, packed), plain)
        attended = ops.paged_attention(q.view(1, 3, 32), kv, tables, start, context, 0.3, soft_cap=2.0, sinks=sinks)
        return attended, ops.linear(attended.view(1, 96)[:, :64], plain, out_dtype=torch.float32)

    scratch = Scratch(1 << 14)
    expected = work()
    recorded, found = record(work, scratch)
    assert all(map(torch.equal, found, expected))
    x.copy_(torch.randn(1, 64))
    context.fill_(9)
    expected = work()
    assert not torch.equal(found[1], expected[1])
    recorded.replay()
    assert all(map(torch.equal, found, expected))
    other, again = record(work, scratch)
    assert [each.data_ptr() for each in again] == [each.data_ptr() for each in found] and other.count == recorded.count == 5
    with pytest.raises(NotRecordable, match="for more than 300 bytes"):
        record(work, Scratch(300))


def test_rows_are_copied_by_a_kernel() -> None:
    """Copies lie in the recording's memory, and a replay copies anew. What has no gaps is not copied."""
    wide, scratch = torch.randn(3, 40).to(BF16), Scratch(1 << 12)

    def work() -> tuple[Tensor, Tensor, Tensor]:
        part, tail = torch.split(wide, [30, 10], dim=1)
        return part.contiguous(), tail.clone(), wide.contiguous()

    with torch.inference_mode():
        recorded, found = record(work, scratch)
        wide.copy_(torch.randn(3, 40))
        recorded.replay()
    assert all(map(torch.equal, found, work())) and found[2] is wide and recorded.count == 2


@pytest.mark.parametrize("name", ["aten.add.Tensor", "starling_apply_token_bitmask"])
def test_what_else_computes_is_refused(name: str) -> None:
    x, row, word = torch.ones(2, 32), torch.tensor([0]), torch.zeros(1, 1, dtype=torch.int32)
    kinds: dict[str, Callable[[], object]] = {
        "aten.add.Tensor": lambda: x + x,
        "starling_apply_token_bitmask": lambda: ops.apply_token_bitmask(x, row, word),
    }
    with pytest.raises(NotRecordable, match=re.escape(name)):
        record(kinds[name], Scratch(1 << 14))
    kinds[name]()
    assert library() is loaded()


def test_calls_of_other_threads_are_not_recorded() -> None:
    x = torch.randn(2, 64)

    def elsewhere() -> None:
        ops.apply_token_bitmask(x, torch.tensor([0]), torch.zeros(1, 2, dtype=torch.int32))

    def work() -> None:
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()

    recorded, _ = record(work, Scratch(1 << 14))
    assert recorded.count == 0 and x[0].isinf().all()
