"""What the kernels of sampling share: scaled logits, and floats as integers of the same order."""

import triton
import triton.language as tl


@triton.jit
def scaled_logits(logits, at, here, temperature):
    """logits[at] / temperature (0: as they are), rounded as the reference rounds it; -inf where not `here`.

    One that is not a number becomes +inf: it is chosen before any other, and what is chosen shows that the row is broken.
    """
    values = tl.div_rn(tl.load(logits + at, mask=here, other=float("-inf")), tl.where(temperature == 0, 1.0, temperature))
    return tl.where(values == values, values, float("inf"))


@triton.jit
def key_of(x):
    """fp32 -> int32 of the same order; -0.0 comes right before 0.0."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """The inverse of `key_of`."""
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)
