"""Whole files in one system call, past the page cache where that is asked for.

O_DIRECT wants addresses, offsets and lengths in whole pages. Offsets and lengths are so by the format; an address that is not takes
the way through a buffer of the thread's own.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from ctypes import addressof, c_char
from errno import EINVAL
from mmap import mmap
from pathlib import Path
from threading import local
from typing import Protocol

from starling_engine.kv_offload.secondary.folder.header import PAGE, ObjectDamaged, pages

_buffers = local()


def buffer(name: str, size: int) -> memoryview:
    """`size` bytes at a page's start; the calling thread's until it asks for `name` again."""
    held: mmap | None = getattr(_buffers, name, None)
    if held is None or len(held) < size:
        held = mmap(-1, pages(max(size, 1)))
        setattr(_buffers, name, held)
    return memoryview(held)[:size]


def is_aligned(data: memoryview) -> bool:
    """Whether it begins a page. What cannot be written to counts as not aligned: its address is not to be had."""
    return not data.readonly and addressof(c_char.from_buffer(data)) % PAGE == 0


def write_file(path: Path, header: bytes, data: memoryview, direct: bool) -> None:
    """Makes `path`, which must not exist. Raises OSError; what is there then is left for the caller to remove."""
    first = buffer("header", len(header))
    first[:] = header
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if direct else 0), 0o644)
    try:
        _whole(os.pwritev, fd, [first, *_padded(data, direct)])
    finally:
        os.close(fd)


def _padded(data: memoryview, direct: bool) -> list[memoryview]:
    """The data and zeros up to a page's end, through a buffer as far as needed."""
    size = data.nbytes
    kept = size // PAGE * PAGE if not direct or is_aligned(data) else 0
    tail = buffer("tail", pages(size) - kept)
    tail[: size - kept] = data[kept:]
    tail[size - kept :] = bytes(len(tail) - (size - kept))
    return [part for part in (data[:kept], tail) if part.nbytes]


def read_file(fd: int, header: memoryview, into: memoryview, direct: bool) -> None:
    """Fills both from the file's start; `header` is of whole pages. Raises Damaged when the file ends before, OSError."""
    size = into.nbytes
    kept = size // PAGE * PAGE if not direct or is_aligned(into) else 0
    tail = buffer("tail", pages(size) - kept)
    _whole(os.preadv, fd, [part for part in (header, into[:kept], tail) if part.nbytes])
    into[kept:] = tail[: size - kept]


class _Vectored(Protocol):
    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int: ...


def _whole(move: _Vectored, fd: int, parts: list[memoryview]) -> None:
    """Calls `move` until it has moved all parts: it may stop early, at a signal or at 2 GiB."""
    offset = 0
    while parts:
        moved = move(fd, parts, offset)
        if not moved:
            raise ObjectDamaged("is cut off")
        offset += moved
        while parts and moved >= parts[0].nbytes:
            moved -= parts.pop(0).nbytes
        if moved:
            parts[0] = parts[0][moved:]


def can_go_direct(path: Path) -> bool | None:
    """Whether a file can be written past the page cache, tried at `path`, where there is none; None when it cannot be tried now."""
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
