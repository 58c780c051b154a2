"""Vectors in the types that clients ask for: as text, in bytes, in bits."""

import array
import base64
import math
import sys
from collections.abc import Collection

from starling_engine.errors import InvalidRequest, RequestFailed

from starling_agent.openai.protocol.answers import VectorsByType
from starling_agent.openai.protocol.embedding import VectorType

INT8_MAX = 127
UNSIGNED = 128
"""Is added to signed bytes."""


NUMBERS = ("float", "base64")
"""The types that have a value for what is not a number; in JSON that is null."""


def check_types(types: Collection[VectorType], dimensions: int) -> None:
    """Raises InvalidRequest for bits of vectors that do not fill bytes."""
    if dimensions % 8 and not {"binary", "ubinary"}.isdisjoint(types):
        raise InvalidRequest(f"bits fill bytes where dimensions are a multiple of 8, got {dimensions}", "embedding_types")


def vectors_by_type(vectors: list[list[float]], types: Collection[VectorType]) -> VectorsByType:
    """Returns the vectors in all the types, which were checked.

    Raises RequestFailed where the model has made what is not a number, and a type has no value for it.
    """
    if not {*types}.issubset(NUMBERS):
        _check_numbers(vectors)
    found = VectorsByType()
    if "float" in types:
        found.float_ = vectors
    if "base64" in types:
        found.base64 = [as_base64(vector) for vector in vectors]
    if "int8" in types or "uint8" in types:
        in_bytes = [as_int8(vector) for vector in vectors]
        found.int8 = in_bytes if "int8" in types else None
        found.uint8 = [[value + UNSIGNED for value in vector] for vector in in_bytes] if "uint8" in types else None
    if "binary" in types or "ubinary" in types:
        in_bits = [as_bits(vector) for vector in vectors]
        found.binary = [[byte - UNSIGNED for byte in bits] for bits in in_bits] if "binary" in types else None
        found.ubinary = [list(bits) for bits in in_bits] if "ubinary" in types else None
    return found


def _check_numbers(vectors: list[list[float]]) -> None:
    for i, vector in enumerate(vectors):
        if not all(map(math.isfinite, vector)):
            why = f"the vector of input {i} has what is not a number"
            raise RequestFailed(f"{why}; of the embedding_types, only {' and '.join(NUMBERS)} have a value for it")


def as_base64(vector: list[float]) -> str:
    """Encodes float32, little-endian, as OpenAI's client decodes it."""
    values = array.array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode("ascii")


def as_int8(vector: list[float]) -> list[int]:
    """Returns the vector's numbers in the scale in which the largest one is 127.

    A scale of all vectors would need samples of what is embedded, which nobody has here. Cosines do not depend on it.
    """
    scale = INT8_MAX / (max(map(abs, vector), default=0.0) or 1.0)
    return [round(value * scale) for value in vector]


def as_bits(vector: list[float]) -> bytes:
    """Returns a bit for each number, which says if it is above 0; the first one is the highest bit of the first byte."""
    return int("".join("1" if value > 0 else "0" for value in vector), 2).to_bytes(len(vector) // 8, "big")
