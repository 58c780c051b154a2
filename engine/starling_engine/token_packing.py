"""Token ids in messages: int32, little-endian. A prompt takes 4 bytes a token and is copied, not parsed."""

import sys
from array import array
from collections.abc import Sequence

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


def _ordered(ids: "array[int]") -> "array[int]":
    if _SWAPS:
        ids.byteswap()
    return ids
