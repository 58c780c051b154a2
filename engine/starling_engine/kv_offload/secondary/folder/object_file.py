"""The file of an object: a header of whole pages, then the data, filled up to a whole page with zeros.

    magic, format, bytes of JSON, their checksum | JSON | zeros | data | zeros

The header names what the file holds and has a checksum of each layer. Checksums are XXH3 of 64 bits: they find damage, at the
memory's speed, and are no protection against others who may write to the folder.

A file is read and written by one system call, past the page cache where that is wanted. O_DIRECT needs addresses, offsets and
lengths in whole pages. The format has such offsets and lengths; data at other addresses goes through a buffer of the thread.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from ctypes import addressof, c_char
from errno import EINVAL
from mmap import mmap
from pathlib import Path
from threading import local
from typing import Protocol

import msgspec
from xxhash import xxh3_64

from starling_engine.kv_offload.secondary.base import ChunkPart, ObjectKey
from starling_engine.kv_offload.secondary.fingerprint import Fingerprint

PAGE = 4096
"""Bytes of which O_DIRECT needs multiples, on every usual disk."""
FORMAT = 1
_MAGIC = b"starlkv\n"
_PREFIX = struct.Struct("<8sIIQ")


class ObjectDamaged(Exception):
    """The file does not hold what it should; the message says what is wrong."""


# ---- the header ----


class ObjectHeader(msgspec.Struct):
    """Header of `bytes` of data, in equal parts for each layer of `part`; `layers` are their checksums.

    `fingerprint` and `name` are in hex.
    """

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


# Made here, as wherever threads decode: msgspec (0.22) crashes when two of them are the first to decode a type.
_decode_json = msgspec.json.Decoder(ObjectHeader).decode


def pages(size: int) -> int:
    """Returns `size` rounded up to whole pages, in bytes."""
    return -(-size // PAGE) * PAGE


def layers_of(part: ChunkPart) -> int:
    return part.end_layer - part.first_layer


def header_bytes(layers: int) -> int:
    """Returns the header's size, which a reader must know before it has read: 21 bytes a layer, and at most 1024 of all else."""
    return pages(1024 + 21 * layers)


def checksums(data: memoryview, layers: int) -> Iterator[int]:
    """Yields the checksum of each layer. Large updates release the interpreter's lock."""
    each = len(data) // layers
    for at in range(0, each * layers, each):
        layer = xxh3_64()
        layer.update(data[at : at + each])
        yield layer.intdigest()


def make_header(fingerprint: Fingerprint, key: ObjectKey, data: memoryview) -> ObjectHeader:
    layers = layers_of(key.part)
    assert data.nbytes and data.nbytes % layers == 0, "an object holds as much of each of its layers"
    label = fingerprint.model.encode()[:200].decode(errors="ignore")
    hexes = fingerprint.digest.hex(), key.name.hex()
    return ObjectHeader(label, fingerprint.dtype, *hexes, key.group, key.part, data.nbytes, [*checksums(data, layers)])


def encode_header(header: ObjectHeader) -> bytes:
    """Returns whole pages."""
    body = msgspec.json.encode(header)
    packed = _PREFIX.pack(_MAGIC, FORMAT, len(body), xxh3_64(body).intdigest()) + body
    size = header_bytes(len(header.layers))
    assert len(packed) <= size, "a header's fields are bounded"
    return packed.ljust(size, b"\0")


def decode_header(page: memoryview) -> ObjectHeader:
    """Reads the header from the file's first pages. Raises ObjectDamaged."""
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
        header = _decode_json(body)
        names = header.key.name, bytes.fromhex(header.fingerprint)
    except (msgspec.DecodeError, ValueError) as error:
        raise ObjectDamaged(f"has a header that cannot be read: {error}") from error
    numbers = all(0 <= number < 1 << 32 for number in (header.group, *header.part))
    if not (all(names) and numbers and 0 < len(header.layers) == layers_of(header.part) and header.bytes > 0):
        raise ObjectDamaged("has a header that contradicts itself")
    return header


def check_object(header: ObjectHeader, fingerprint: Fingerprint, key: ObjectKey, data: memoryview) -> None:
    """Raises ObjectDamaged unless `data` is what was written by that key for that model."""
    if (header.fingerprint, header.name, header.group, header.part) != (fingerprint.digest.hex(), key.name.hex(), *key[1:]):
        raise ObjectDamaged(f"is another's: of {header.model}, {header.dtype}")
    if header.bytes != data.nbytes:
        raise ObjectDamaged(f"holds {header.bytes} bytes, not {data.nbytes}")
    check_layers(header, data)


def check_layers(header: ObjectHeader, data: memoryview) -> None:
    """Raises ObjectDamaged that names the first damaged layer."""
    for layer, (found, written) in enumerate(zip(checksums(data, len(header.layers)), header.layers, strict=True)):
        if found != written:
            raise ObjectDamaged(f"is damaged in layer {header.part.first_layer + layer}")


# ---- the file ----

_buffers = local()


def buffer(name: str, size: int) -> memoryview:
    """Returns `size` bytes that begin a page; they are the calling thread's until it wants `name` again."""
    held: mmap | None = getattr(_buffers, name, None)
    if held is None or len(held) < size:
        held = mmap(-1, pages(max(size, 1)))
        setattr(_buffers, name, held)
    return memoryview(held)[:size]


def write_file(path: Path, header: bytes, data: memoryview, direct: bool) -> None:
    """Makes `path`, which must not exist. Raises OSError, and leaves the file for the caller to remove."""
    first = buffer("header", len(header))
    first[:] = header
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if direct else 0), 0o644)
    try:
        _transfer(os.pwritev, fd, [first, *_padded(data, direct)])
    finally:
        os.close(fd)


def read_file(fd: int, header: memoryview, into: memoryview, direct: bool) -> None:
    """Fills both from the file's start; `header` is of whole pages. Raises ObjectDamaged when the file ends before, OSError."""
    at = _in_place(into, direct)
    tail = buffer("tail", pages(into.nbytes) - at)
    _transfer(os.preadv, fd, [part for part in (header, into[:at], tail) if part.nbytes])
    into[at:] = tail[: into.nbytes - at]


def _padded(data: memoryview, direct: bool) -> list[memoryview]:
    """Returns the data and zeros up to a page's end."""
    at = _in_place(data, direct)
    tail, rest = buffer("tail", pages(data.nbytes) - at), data.nbytes - at
    tail[:rest] = data[at:]
    tail[rest:] = bytes(len(tail) - rest)
    return [part for part in (data[:at], tail) if part.nbytes]


def _in_place(data: memoryview, direct: bool) -> int:
    """Returns how many bytes need no buffer: all whole pages, unless O_DIRECT is used and `data` does not begin a page.

    The address of read-only data cannot be known.
    """
    aligned = not direct or (not data.readonly and addressof(c_char.from_buffer(data)) % PAGE == 0)
    return data.nbytes // PAGE * PAGE if aligned else 0


class _Vectored(Protocol):
    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int: ...


def _transfer(call: _Vectored, fd: int, parts: list[memoryview]) -> None:
    """Repeats `call` until all parts are done: it may stop early, at a signal or at 2 GiB."""
    offset = 0
    while parts:
        done = call(fd, parts, offset)
        if not done:
            raise ObjectDamaged("is cut off")
        offset += done
        while parts and done >= parts[0].nbytes:
            done -= parts.pop(0).nbytes
        if done:
            parts[0] = parts[0][done:]


def supports_direct(path: Path) -> bool | None:
    """Returns whether O_DIRECT works at `path`, where there is no file; None when that cannot be tried now."""
    try:
        write_file(path, bytes(PAGE), memoryview(bytes(PAGE)), direct=True)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            read_file(fd, buffer("header", PAGE), buffer("data", PAGE), direct=True)
        finally:
            os.close(fd)
    except OSError as error:
        return False if error.errno == EINVAL else None
    except ObjectDamaged:
        return False
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    return True
