"""Each Triton kernel alone, beside the least time that its bytes and operations take, or beside a library's kernel."""

from collections.abc import Iterator

from bench.gpu.case import Case, measure
from bench.gpu.clock import make_clock, measure_limits
from bench.gpu.compile_ahead import before_kernels
from bench.gpu.faults import each_case
from bench.gpu.table import Row


def rows(*, toy: bool, skip: int = 0) -> Iterator[Row]:
    """See `each_case`."""
    yield from before_kernels("bench.gpu.kernels", toy=toy, skip=skip)
    clock = make_clock(toy=toy)
    limits = measure_limits(clock)
    yield from each_case(cases(toy=toy), lambda case: measure(case, clock, limits), skip)


def cases(*, toy: bool) -> list[Case]:
    from bench.gpu import cases_attention, cases_experts, cases_fp8, cases_rows

    return [each for module in (cases_attention, cases_rows, cases_experts, cases_fp8) for each in module.cases(toy=toy)]
