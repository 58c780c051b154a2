"""What the guards of `guarded` catch: each of these kernels is wrong in one way, and would pass without them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction, InterpreterError

from tests.engine.kernels.guarded import GUARD, Watch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is no interpreter")


def copy_too_much(x, out, size, LANES: tl.constexpr):
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    tl.store(out + at, tl.load(x + at, mask=at < size, other=0.0))


def read_too_much(x, out, size, LANES: tl.constexpr):
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    tl.store(out + at, tl.load(x + at), mask=at < size)


def add_up(x, out, size, LANES: tl.constexpr):
    """Each program adds to what the one before has left, as if it came later."""
    lanes = tl.arange(0, LANES)
    at = tl.program_id(0) * LANES + lanes
    before = tl.load(out + at - LANES, mask=at >= LANES, other=0.0)
    tl.store(out + at, before + tl.load(x + at, mask=at < size, other=0.0), mask=at < size)


def copy_twice(x, out, size, LANES: tl.constexpr):
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    here = at < size
    tl.store(out + at, (tl.load(x + at, mask=here) + tl.load(x + at, mask=here)) / 2, mask=here)


def run(kernel: Callable[..., None], x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    interpreted: Any = InterpretedFunction(kernel)
    interpreted[(-(-out.shape[-1] // 8),)](x, out, out.shape[-1], LANES=8)
    return out


@pytest.mark.parametrize(("kernel", "what"), [(copy_too_much, "a write"), (read_too_much, "a read")])
@pytest.mark.parametrize("rows", [1, 3], ids=["at the end", "before the next row"])
def test_what_is_not_a_tensors_is_neither_read_nor_written(kernel: Callable[..., None], what: str, rows: int) -> None:
    """Both tensors are the first row of a larger one, of which nothing else is theirs."""
    x, out = torch.zeros(rows, 20)[0], torch.zeros(rows, 20)[0]
    with pytest.raises(InterpreterError, match=f"{what} outside of its tensors"):
        run(kernel, x, out)
    assert run(kernel, x[:16], out[:16]).shape == (16,)


def test_programs_in_another_order_have_to_give_the_same() -> None:
    with pytest.raises(AssertionError, match="add_up depends on the order of its programs"):
        run(add_up, torch.ones(64), torch.zeros(64))


def test_reads_are_counted_by_element(watch: Watch) -> None:
    x = torch.arange(40.0).view(2, 20)
    with watch.counted() as launches:
        assert torch.equal(run(copy_twice, x[1], torch.empty(20)), x[1])
    (launch,) = launches
    assert launch.kernel == "copy_twice"
    assert launch.reads["x"].tolist() == [2] * 20 and launch.reads["out"].tolist() == [0] * 20


def test_memory_that_nobody_has_written_is_nan() -> None:
    assert torch.empty(GUARD).isnan().all()
