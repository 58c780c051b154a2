"""Each Triton kernel alone, beside the least time that its bytes and operations take, or beside a library's kernel."""

import os
import traceback
from collections.abc import Iterator

import torch

from bench.gpu.clock import make_clock, measure_limits
from bench.gpu.table import Row


def rows(*, toy: bool) -> Iterator[Row]:
    """A kernel that fails is a row that says so, and the others run on; SystemExit at the end, with what was raised."""
    if toy:  # before a kernel is imported
        os.environ["TRITON_INTERPRET"] = "1"
    from bench.gpu import case, cases_attention, cases_experts, cases_rows

    clock, errors = make_clock(toy=toy), []
    limits = measure_limits(clock)
    for one in (each for module in (cases_attention, cases_rows, cases_experts) for each in module.cases(toy=toy)):
        try:
            yield from case.measure(one, clock, limits)
        except Exception:  # noqa: BLE001 - whatever a kernel does, the next one is measured
            errors.append(f"{one.what}: {traceback.format_exc(limit=-3)}")
            yield Row(one.what, "failed")
        if not toy:
            torch.cuda.empty_cache()
    if errors:
        raise SystemExit("\n".join(errors))
