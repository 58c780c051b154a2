"""Products in FP8, beside those in bf16: rows are rounded in the same call."""

from collections.abc import Iterator

import torch
from starling_engine.native.group_quantized import Format, GroupQuantized
from torch.nn import functional as F

from bench.gpu.case import Case
from bench.gpu.clock import Call
from bench.gpu.roofline import Cost

BF16 = torch.bfloat16
FORMS = {
    "by row and token": Format(8, 128, floats=True, by_row=True, rounding="token"),
    "by block and group": Format(8, 128, floats=True, block_rows=128, rounding="group"),
}


def cases(*, toy: bool) -> Iterator[Case]:
    """Matrices of Llama 3 8B: gates and ups, and the output of attention."""
    for n, k in ((256, 128),) if toy else ((28672, 4096), (4096, 4096)):
        for rows in (3,) if toy else (1, 64, 256, 8192):
            yield from (_product(rows, n, k, name) for name in FORMS)


def _product(rows: int, n: int, k: int, name: str) -> Case:
    """Reads rows and the matrix once. Operations are counted at bf16's rate, of which FP8 may have twice as much."""

    def make(device: torch.device) -> Call:
        from starling_engine.kernels.scaled_linear import scaled_linear
        from starling_engine.kernels.scaled_weight import pack_scaled

        x, numbers = torch.randn(rows, k, dtype=BF16, device=device), torch.randn(n, k, device=device)
        scales = torch.full((n, k // 128), 0.01, device=device)
        weight = pack_scaled(GroupQuantized(numbers.to(torch.float8_e4m3fn).view(torch.uint8), scales, FORMS[name]), device)
        return lambda: scaled_linear(x, weight)

    def plain(device: torch.device) -> Call:
        x, weight = torch.randn(rows, k, dtype=BF16, device=device), torch.randn(n, k, dtype=BF16, device=device)
        return lambda: F.linear(x, weight)

    cost = Cost(1.0 * n * k + 2.0 * rows * (n + k), 2.0 * rows * n * k)
    return Case(what=f"product in FP8, {rows} x {n} x {k}, {name}", make=make, cost=cost, rivals={"that in bf16": plain})
