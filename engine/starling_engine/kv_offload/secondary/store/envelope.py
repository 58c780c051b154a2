"""What an object is called in the store, and the header that tells a whole value from a damaged or foreign one.

| magic "STKV" | version u16 | zero u16 | payload's bytes u32 | XXH3 of the payload u64 | key's SHA-256, first 12 bytes | payload
"""

import struct
from hashlib import sha256

from xxhash import xxh3_64_intdigest

from starling_engine.kv_offload.secondary.base import ObjectKey

HEADER = struct.Struct("<4sHHIQ12s")
MAGIC = b"STKV"
VERSION = 2


def store_key(fingerprint: bytes, key: ObjectKey) -> str:
    """starling/FINGERPRINT/GROUP/PART/NAME, all in hexadecimal digits; a part is its four bounds."""
    part = ".".join(f"{bound:x}" for bound in key.part)
    return f"starling/{fingerprint.hex()}/{key.group:x}/{part}/{key.name.hex()}"


def seal(key: str, payload: memoryview) -> bytes:
    """The header that goes before the payload."""
    return HEADER.pack(MAGIC, VERSION, 0, payload.nbytes, xxh3_64_intdigest(payload), sha256(key.encode()).digest()[:12])


def is_whole(key: str, value: memoryview, payload_bytes: int) -> bool:
    """Whether `value`, header and payload, is what `seal` was called for: this key, these bytes."""
    if value.nbytes != HEADER.size + payload_bytes:
        return False
    payload = value[HEADER.size :]
    return bytes(value[: HEADER.size]) == seal(key, payload)
