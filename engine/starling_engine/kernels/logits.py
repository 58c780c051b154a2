"""Helpers of the sampling kernels: scaled logits, and floats as integers of the same order."""

import triton
import triton.language as tl


@triton.jit
def scaled_logits(logits, at, here, temperature):
    """Returns logits[at] / temperature (0: unscaled), rounded as in the reference; -inf where not `here`.

    NaN becomes +inf: it is chosen before any other, and the chosen token shows that the row is broken.
    """
    values = tl.div_rn(tl.load(logits + at, mask=here, other=float("-inf")), tl.where(temperature == 0, 1.0, temperature))
    return tl.where(values == values, values, float("inf"))


@triton.jit
def key_of(x):
    """Maps fp32 to int32 in the same order; -0.0 comes right before 0.0."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """Inverts `key_of`."""
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)
