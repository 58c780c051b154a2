"""The file of an object: a header of whole pages, then the data, filled up to a whole page with zeros.

    magic, format, bytes of JSON, their checksum | JSON | zeros | data | zeros

The header names what the file holds and has a checksum of each layer. Checksums are XXH3 of 64 bits: they find damage, at the
memory's speed, and are no protection against others who may write to the folder.

A file is read and written by one system call, past the page cache where that is wanted. O_DIRECT needs addresses, offsets and
lengths in whole pages. The format has such offsets and lengths; other data goes through a buffer of the thread.
"""

import os
import struct
from collections.abc import Callable, Iterator
from ctypes import addressof, c_char
from errno import EINVAL
from io import FileIO
from mmap import mmap
from pathlib import Path
from threading import local
from typing import Annotated

import msgspec
from xxhash import xxh3_64

from starling_engine.kv_offload.secondary.base import ChunkPart, ObjectKey
from starling_engine.kv_offload.secondary.fingerprint import Fingerprint

PAGE = 4096
"""Bytes of which O_DIRECT needs multiples, on every usual disk."""
FORMAT = 1
_MAGIC = b"starlkv\n"
_PREFIX = struct.Struct("<8sIIQ")

Hex = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{2})+$")]
UInt32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class ObjectDamaged(Exception):
    """The file does not hold what it should; the message says what is wrong."""


# ---- the header ----


class ObjectHeader(msgspec.Struct):
    """Header of `bytes` of data, in equal parts for each layer of `part`; `layers` are their checksums."""

    model: str
    dtype: str
    fingerprint: Hex
    name: Hex
    group: UInt32
    part: tuple[UInt32, UInt32, UInt32, UInt32]
    bytes: Annotated[int, msgspec.Meta(gt=0)]
    layers: Annotated[list[int], msgspec.Meta(min_length=1)]

    @property
    def key(self) -> ObjectKey:
        return ObjectKey(bytes.fromhex(self.name), self.group, ChunkPart(*self.part))


# Made here, as wherever threads decode: msgspec (0.22) crashes when two of them are the first to decode a type.
_decode_json = msgspec.json.Decoder(ObjectHeader).decode


def file_bytes(key: ObjectKey, size: int) -> int:
    """Returns the size of the file of an object with `size` bytes of data."""
    return _header_bytes(layers_of(key.part)) + _pages(size)


def layers_of(part: ChunkPart) -> int:
    return part.end_layer - part.first_layer


def _pages(size: int) -> int:
    """Returns `size` rounded up to whole pages, in bytes."""
    return -(-size // PAGE) * PAGE


def _header_bytes(layers: int) -> int:
    """Returns the header's size, which a reader must know before it has read: 21 bytes a layer, and at most 1024 of all else."""
    return _pages(1024 + 21 * layers)


def _checksums(data: memoryview, layers: int) -> Iterator[int]:
    """Yields the checksum of each layer. Large updates release the interpreter's lock."""
    each = len(data) // layers
    for at in range(0, len(data), each):
        layer = xxh3_64()
        layer.update(data[at : at + each])
        yield layer.intdigest()


def make_header(fingerprint: Fingerprint, key: ObjectKey, data: memoryview) -> ObjectHeader:
    layers = layers_of(key.part)
    assert data.nbytes and data.nbytes % layers == 0, "an object holds as much of each of its layers"
    label = fingerprint.model.encode()[:200].decode(errors="ignore")
    hexes = fingerprint.digest.hex(), key.name.hex()
    return ObjectHeader(label, fingerprint.dtype, *hexes, key.group, key.part, data.nbytes, [*_checksums(data, layers)])


def encode_header(header: ObjectHeader) -> bytes:
    """Returns whole pages."""
    body = msgspec.json.encode(header)
    packed = _PREFIX.pack(_MAGIC, FORMAT, len(body), xxh3_64(body).intdigest()) + body
    size = _header_bytes(len(header.layers))
    assert len(packed) <= size, "a header's fields are bounded"
    return packed.ljust(size, b"\0")


def decode_header(page: memoryview) -> ObjectHeader:
    """Reads the header from the file's first pages. Raises ObjectDamaged."""
    if len(page) < PAGE or page[: len(_MAGIC)] != _MAGIC:
        raise ObjectDamaged("is no object of the cache")
    _, version, length, checksum = _PREFIX.unpack_from(page)
    if version != FORMAT:
        raise ObjectDamaged(f"has format {version}, this release reads {FORMAT}")
    body = page[_PREFIX.size : _PREFIX.size + length]
    if len(body) != length or xxh3_64(body).intdigest() != checksum:
        raise ObjectDamaged("has a damaged header")
    try:
        return _decode_json(body)
    except msgspec.DecodeError as error:
        raise ObjectDamaged(f"has a header that cannot be read: {error}") from error


def _check_size(size: int, key: ObjectKey, data: int) -> None:
    if size != file_bytes(key, data):
        raise ObjectDamaged(f"has {size} bytes, not {file_bytes(key, data)}")


def _check_layers(header: ObjectHeader, data: memoryview) -> None:
    if [*_checksums(data, len(header.layers))] != header.layers:
        raise ObjectDamaged("has damaged data")


# ---- objects ----


def write_object(path: Path, fingerprint: Fingerprint, key: ObjectKey, data: memoryview, direct: bool) -> None:
    """Makes `path`, which must not exist. Raises OSError, and leaves the file for the caller to remove."""
    header = encode_header(make_header(fingerprint, key, data))
    first, body = _buffer("header", len(header)), _whole_pages(data, direct)
    first[:] = header
    if body is not data:
        body[: data.nbytes] = data
        body[data.nbytes :] = bytes(body.nbytes - data.nbytes)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    with FileIO(os.open(path, flags, 0o644), "w") as file:
        _transfer(os.pwritev, file.fileno(), [first, body])


def read_object(path: Path, fingerprint: Fingerprint, key: ObjectKey, into: memoryview, direct: bool) -> float:
    """Fills `into` with what was written by that key for that model. Returns the file's time of modification, in seconds.

    Raises ObjectDamaged, OSError.
    """
    with FileIO(os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))) as file:
        stat = os.fstat(file.fileno())
        _check_size(stat.st_size, key, into.nbytes)
        first = _buffer("header", _header_bytes(layers_of(key.part)))
        _read(file.fileno(), first, into, direct)
    header = decode_header(first)
    if (header.fingerprint, header.key, header.bytes) != (fingerprint.digest.hex(), key, into.nbytes):
        raise ObjectDamaged(f"is another's: of {header.model}, {header.dtype}, {header.bytes} bytes")
    _check_layers(header, into)
    return stat.st_mtime


def read_header(path: Path, whole: bool = False) -> ObjectHeader:
    """Reads the header, and if `whole` checks the data, too. Raises ObjectDamaged, OSError."""
    with FileIO(path) as file:
        size = os.fstat(file.fileno()).st_size
        first = _buffer("header", 16 * PAGE)  # headers of many layers have several pages
        header = decode_header(first[: os.preadv(file.fileno(), [first], 0)])
        _check_size(size, header.key, header.bytes)
        if whole:
            data = _buffer("data", header.bytes)
            _read(file.fileno(), first[: _header_bytes(len(header.layers))], data, direct=False)
            _check_layers(header, data)
        return header


def supports_direct(path: Path) -> bool:
    """Returns whether O_DIRECT works at `path`, where there is no file. Raises OSError where nothing can be written there."""
    try:
        with FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT), "w") as file:
            file.write(_buffer("data", PAGE))
        return True
    except OSError as error:
        if error.errno != EINVAL:
            raise
        return False
    finally:
        path.unlink(missing_ok=True)


# ---- transfers ----

_buffers = local()


def _buffer(name: str, size: int) -> memoryview:
    """Returns `size` bytes that begin a page; they are the calling thread's until it wants `name` again."""
    held: mmap | None = getattr(_buffers, name, None)
    if held is None or len(held) < size:
        held = mmap(-1, _pages(size))
        setattr(_buffers, name, held)
    return memoryview(held)[:size]


def _read(fd: int, header: memoryview, into: memoryview, direct: bool) -> None:
    """Fills both from the file's start; `header` is of whole pages. Raises ObjectDamaged when the file ends before, OSError."""
    body = _whole_pages(into, direct)
    _transfer(os.preadv, fd, [header, body])
    if body is not into:
        into[:] = body[: into.nbytes]


def _whole_pages(data: memoryview, direct: bool) -> memoryview:
    """Returns `data` itself where it may be transferred as it is, else a buffer with room for it.

    The address of read-only data cannot be known.
    """
    aligned = not direct or (not data.readonly and addressof(c_char.from_buffer(data)) % PAGE == 0)
    return data if aligned and data.nbytes % PAGE == 0 else _buffer("body", _pages(data.nbytes))


def _transfer(call: Callable[[int, list[memoryview], int], int], fd: int, parts: list[memoryview]) -> None:
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
