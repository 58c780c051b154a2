"""Launches that begin before the one before them ends (programmatic dependent launch), from Hopper on.

What is launched so has to wait before it reads or writes what others may have to do with: all programs, those without work, too.
Then a launch has ended when all before it have, as if none overlapped. Until then it may ask for weights, which no step changes.
"""

import torch
import triton
import triton.language as tl

from starling_engine.platforms.triton_support import capability


def overlaps(device: torch.device) -> bool:
    """Returns whether a launch on the device may begin early."""
    return device.type != "cpu" and capability(device) >= 90


@triton.jit
def begin_after(OVERLAPS: tl.constexpr):
    """Lets the next launch begin, and waits until the one before has ended; nothing, unless the launch OVERLAPS."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def ask_for(rows, BYTES: tl.constexpr, PIECES: tl.constexpr):
    """Has the L2 cache fetch the first BYTES of each row, pointers [ROWS], by PIECES copies a row: nothing waits for them."""
    SIZE: tl.constexpr = BYTES // PIECES
    places = rows.to(tl.int64)[:, None] + (tl.arange(0, PIECES) * SIZE)[None, :]
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; // $0", "=r,l,r", [places, SIZE], dtype=tl.int32, is_pure=False, pack=1
    )
