"""Token ids and floats in messages: int32 and fp32, little-endian. A number takes 4 bytes and is copied, not parsed."""

import sys
from array import array
from collections.abc import Sequence
from typing import TypeVar

N = TypeVar("N", int, float)
ID_BYTES = 4
_SWAPS = sys.byteorder != "little"


def pack_tokens(ids: Sequence[int]) -> bytes:
    """Raises OverflowError for an id that does not fit."""
    return _ordered(array("i", ids)).tobytes()


def unpack_tokens(packed: bytes) -> "array[int]":
    """Raises ValueError for a length that is no whole number of tokens."""
    ids = array("i")
    ids.frombytes(packed)
    return _ordered(ids)


def pack_floats(values: Sequence[float]) -> bytes:
    return _ordered(array("f", values)).tobytes()


def unpack_floats(packed: bytes) -> list[float]:
    """Raises ValueError for a length that is no whole number of floats."""
    values = array("f")
    values.frombytes(packed)
    return _ordered(values).tolist()


def _ordered(numbers: "array[N]") -> "array[N]":
    if _SWAPS:
        numbers.byteswap()
    return numbers
