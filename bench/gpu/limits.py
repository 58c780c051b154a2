"""What the device can do: every share in the table is of one of these."""

from collections.abc import Iterator

from bench.gpu.clock import make_clock, measure_limits
from bench.gpu.table import Row, quantity


def rows(*, toy: bool) -> Iterator[Row]:
    limits = measure_limits(make_clock(toy=toy))
    yield Row("copy within device memory, read and written", quantity(limits.bandwidth, "B/s"))
    yield Row("large bf16 matrix product", quantity(limits.rate, "FLOP/s"))
