"""Says which matrices of FP8 are multiplied by rows of FP8, and by which kernel. No kernels here, and nothing that needs a device.

Where rows are not rounded, codes become numbers on the way (`quantized_linear`): that is what older GPUs do.
"""

from typing import Literal

import torch

from starling_engine.model_config.quantization import ROUNDED_GROUP
from starling_engine.native.group_quantized import Format

CAPABILITY = 89
"""Ada, the first whose matrix units know float8_e4m3fn, and for which torch has `_scaled_mm`."""
STREAMED_ROWS = 64
"""Most rows for which bytes of weights count alone.

CUTLASS's tiles of 128 columns make 32 programs for a matrix of 4,096 rows. Ours, of 32 or 64 columns, make more."""
UNIT = 16
"""`_scaled_mm` wants rows and columns of a matrix to be multiples of it."""

Product = Literal["numbers", "triton", "by row", "by tensor"]
"""numbers: codes become numbers of x's dtype, and rows are not rounded. triton: `scaled_linear`'s own kernel. The other two are
`torch._scaled_mm` with a scale for each row of both, or with one for each."""


def product_of(
    form: Format,
    n: int,
    k: int,
    rows: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    capability: int,
    *,
    one_scale: bool = False,
) -> Product:
    """Chooses how `rows` of `dtype` are multiplied by a matrix [n, k]. `one_scale`: all of its rows have the same."""
    if not rounds(form, dtype, capability):
        return "numbers"
    if rows <= STREAMED_ROWS or not form.by_row or form.rounding == "group" or n % UNIT or k % UNIT:
        return "triton"
    if form.rounding == "static" and one_scale and out_dtype in (torch.bfloat16, torch.float16):
        return "by tensor"
    # CUTLASS's kernel for rows writes nothing else.
    return "by row" if out_dtype == torch.bfloat16 else "triton"


def rounds(form: Format, dtype: torch.dtype, capability: int) -> bool:
    """Says whether a matrix is kept to be multiplied by rows of FP8."""
    if not form.floats or not form.rounding or capability < CAPABILITY or dtype not in (torch.bfloat16, torch.float16):
        return False
    in_groups = form.group % ROUNDED_GROUP == 0
    return (form.by_row or in_groups) and (form.rounding != "group" or in_groups)


def scaled_bytes(form: Format) -> float:
    """Bytes of a weight that `rounds`, with its share of the scales; that of a row's one scale is left out."""
    return 1.0 if form.by_row else 1.0 + 4 / (ROUNDED_GROUP * kept_rows(form))


def kept_rows(form: Format) -> int:
    """Returns how many rows have their scales once, where a block of the whole matrix begins at row 0."""
    return ROUNDED_GROUP if form.block_rows == ROUNDED_GROUP else 1
