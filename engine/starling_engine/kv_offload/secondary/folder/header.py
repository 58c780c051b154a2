"""An object's file: a header of whole pages, then the data, filled up to a whole page with zeros.

    magic, format, bytes of JSON, their checksum | JSON | zeros | data | zeros

The header names what the file holds and has a checksum of each layer, so a file is trusted for nothing but its content. Checksums
are XXH3 of 64 bits: they find damage, at the memory's speed, and are no protection against who may write to the folder.
"""

import struct
from collections.abc import Iterator

import msgspec
from xxhash import xxh3_64

from starling_engine.kv_offload.secondary.base import ChunkPart, ObjectKey
from starling_engine.kv_offload.secondary.fingerprint import Fingerprint

PAGE = 4096
"""What O_DIRECT needs offsets, lengths and addresses to be multiples of, on every usual disk."""

FORMAT = 1
_MAGIC = b"starlkv\n"
_PREFIX = struct.Struct("<8sIIQ")
_FIXED_BYTES, _LAYER_BYTES, _LABEL = 1024, 21, 200


class ObjectDamaged(Exception):
    """The file does not hold what it should; the message says what is wrong."""


class ObjectHeader(msgspec.Struct):
    """`bytes` of data in equal parts for each layer of `part`, whose checksums are `layers`. `fingerprint` and `name` in hex."""

    model: str
    dtype: str
    fingerprint: str
    name: str
    group: int
    part: ChunkPart
    bytes: int
    layers: list[int]

    @property
    def key(self) -> ObjectKey:
        return ObjectKey(bytes.fromhex(self.name), self.group, self.part)


# Here and wherever threads decode: msgspec (0.22) crashes when two of them are the first to decode a type.
_decode_header = msgspec.json.Decoder(ObjectHeader).decode


def pages(size: int) -> int:
    """`size` rounded up to whole pages, in bytes."""
    return -(-size // PAGE) * PAGE


def layers_of(part: ChunkPart) -> int:
    return part.end_layer - part.first_layer


def header_bytes(layers: int) -> int:
    """Of a part of `layers` layers: one page up to 146 of them. A reader must know it before it has read."""
    return pages(_FIXED_BYTES + _LAYER_BYTES * layers)


def checksums(data: memoryview, layers: int) -> Iterator[int]:
    """One a layer. Large updates release the interpreter's lock."""
    each = len(data) // layers
    for at in range(0, each * layers, each):
        layer = xxh3_64()
        layer.update(data[at : at + each])
        yield layer.intdigest()


def make_header(fingerprint: Fingerprint, key: ObjectKey, data: memoryview) -> ObjectHeader:
    layers = layers_of(key.part)
    assert data.nbytes and data.nbytes % layers == 0, "an object holds as much of each of its layers"
    label = fingerprint.model.encode()[:_LABEL].decode(errors="ignore")
    hexes = fingerprint.digest.hex(), key.name.hex()
    return ObjectHeader(label, fingerprint.dtype, *hexes, key.group, key.part, data.nbytes, [*checksums(data, layers)])


def encode(header: ObjectHeader) -> bytes:
    """Whole pages."""
    body = msgspec.json.encode(header)
    packed = _PREFIX.pack(_MAGIC, FORMAT, len(body), xxh3_64(body).intdigest()) + body
    size = header_bytes(len(header.layers))
    assert len(packed) <= size, "a header's fields are bounded"
    return packed.ljust(size, b"\0")


def decode(page: memoryview) -> ObjectHeader:
    """From the file's first pages. Raises Damaged."""
    if len(page) < _PREFIX.size:
        raise ObjectDamaged(f"has {len(page)} bytes, less than a header")
    magic, version, length, checksum = _PREFIX.unpack_from(page)
    if magic != _MAGIC:
        raise ObjectDamaged("is no object of the cache")
    if version != FORMAT:
        raise ObjectDamaged(f"has format {version}, this release reads {FORMAT}")
    body = page[_PREFIX.size : _PREFIX.size + length]
    if len(body) != length or xxh3_64(body).intdigest() != checksum:
        raise ObjectDamaged("has a damaged header")
    try:
        header = _decode_header(body)
        names = header.key.name, bytes.fromhex(header.fingerprint)
    except (msgspec.DecodeError, ValueError) as error:
        raise ObjectDamaged(f"has a header that cannot be read: {error}") from error
    numbers = all(0 <= number < 1 << 32 for number in (header.group, *header.part))
    if not (all(names) and numbers and 0 < len(header.layers) == layers_of(header.part) and header.bytes > 0):
        raise ObjectDamaged("has a header that contradicts itself")
    return header


def check(header: ObjectHeader, fingerprint: Fingerprint, key: ObjectKey, data: memoryview) -> None:
    """Raises Damaged unless `data` is what was written by that name for that model."""
    named = header.fingerprint, header.name, header.group, header.part
    if named != (fingerprint.digest.hex(), key.name.hex(), key.group, key.part):
        raise ObjectDamaged(f"is another's: of {header.model}, {header.dtype}")
    if header.bytes != data.nbytes:
        raise ObjectDamaged(f"holds {header.bytes} bytes, not {data.nbytes}")
    check_layers(header, data)


def check_layers(header: ObjectHeader, data: memoryview) -> None:
    """Raises Damaged naming the first layer that is."""
    for layer, (now, then) in enumerate(zip(checksums(data, len(header.layers)), header.layers, strict=True)):
        if now != then:
            raise ObjectDamaged(f"is damaged in layer {header.part.first_layer + layer}")
