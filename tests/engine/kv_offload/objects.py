"""Small objects, whose content follows from their number, and tiers to hold them."""

import random
from hashlib import sha256
from mmap import mmap
from pathlib import Path

from starling_engine.kv_offload.secondary.base import ChunkPart, ObjectKey
from starling_engine.kv_offload.secondary.fingerprint import Fingerprint
from starling_engine.kv_offload.secondary.folder.layout import FolderLayout
from starling_engine.kv_offload.secondary.folder.tier import FolderTier

MODEL = Fingerprint("org/model@commit", "org/model@commit", "float32")
PART = ChunkPart(0, 4, 0, 2)
SIZE = 4 * 3000
FILE = 4096 * 4
"""Bytes of an object's file: a page of header, three of data."""


def key(number: int, part: ChunkPart = PART, group: int = 0) -> ObjectKey:
    return ObjectKey(sha256(b"%d" % number).digest(), group, part)


def content(number: int, size: int = SIZE) -> bytes:
    return random.Random(number).randbytes(size)


def memory(data: bytes, at: int = 0) -> memoryview:
    """Returns `data` in memory that may be written to, `at` bytes past a page's start."""
    view = memoryview(mmap(-1, at + len(data)))[at:]
    view[:] = data
    return view


def quiet_tier(root: Path, limit: int = 1 << 30, fingerprint: Fingerprint = MODEL, direct: bool = False) -> FolderTier:
    """Opens a tier whose janitor does nothing by itself: tests call `tick`."""
    tier = FolderTier(FolderLayout(root, fingerprint.digest), fingerprint, limit, direct)
    tier.janitor.look()
    return tier


def run_janitor(tier: FolderTier) -> None:
    """Does what the janitor does in its first second or two."""
    tier.janitor.tick()
    tier.janitor.tick()


def read(tier: FolderTier, number: int, size: int = SIZE, at: int = 0) -> bytes:
    into = memory(bytes(size), at)
    tier.read(key(number), into)
    return bytes(into)


def write(tier: FolderTier, number: int, at: int = 0) -> None:
    tier.write(key(number), memory(content(number), at))


def file_of(root: Path, number: int, fingerprint: Fingerprint = MODEL) -> Path:
    return Path(FolderLayout(root, fingerprint.digest).path_of(key(number)))
