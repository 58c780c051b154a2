"""What makes a cached chunk valid besides its tokens: the weights, dtype and layout that keys and values were computed with.

It outlives processes and machines, so it is made of what the model's files hold, never of their path or dates.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from starling_engine.errors import ModelError

KV_LAYOUT = 2
"""Version of the order in which a chunk's keys and values lie, what they mean (rotated keys), and of `identity`."""

SAMPLE_BYTES = 256


@dataclass(frozen=True)
class Fingerprint:
    """`model` is for people; what counts is `identity`, `dtype` and `layout`."""

    model: str
    identity: str
    dtype: str
    layout: int = KV_LAYOUT

    @property
    def digest(self) -> bytes:
        """32 bytes, SHA-256."""
        return sha256(repr((self.identity, self.dtype, self.layout)).encode()).digest()


def fingerprint_of(model_path: str, load_format: str, seed: int, dtype: str) -> Fingerprint:
    """Of the model in the folder `model_path`, as WorkerConfig names it.

    Takes milliseconds: of the weights it reads a few bytes of each tensor. Raises ModelError when the files cannot be read.
    """
    folder = Path(model_path)
    try:
        if load_format == "dummy":
            return Fingerprint(f"{folder.name} (dummy weights)", f"dummy {seed} {_config_hash(folder)}", dtype)
        repository = _hub_name(folder)
        if repository is None:
            return Fingerprint(folder.name, _content_hash(folder), dtype)
        # The commit is what a branch's name led to. It does not say whether the files are still those that came with it.
        return Fingerprint(repository, f"{repository} {_content_hash(folder)}", dtype)
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ModelError(f"{folder} has no fingerprint, its files cannot be read: {error!r}") from error


def _hub_name(folder: Path) -> str | None:
    """`org/name@commit` for a snapshot in the hub's cache: models--org--name/snapshots/commit."""
    repository = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not repository.startswith("models--"):
        return None
    return f"{repository.removeprefix('models--').replace('--', '/')}@{folder.name}"


def _config_hash(folder: Path) -> str:
    return sha256((folder / "config.json").read_bytes()).hexdigest()


def _content_hash(folder: Path) -> str:
    """Fine-tunes of one shape differ in it, as each tensor's middle is part of it."""
    digest = sha256(_config_hash(folder).encode())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(repr((path.name, path.stat().st_size)).encode())
        with path.open("rb", buffering=0) as file:
            for piece in _samples(file, path.stat().st_size):
                digest.update(piece)
    return digest.hexdigest()


def _samples(file: BinaryIO, size: int) -> Iterator[bytes]:
    """The header of a safetensors file, and the middle of each tensor; all of one that is no larger, such as a scale."""
    length = int.from_bytes(file.read(8), "little")
    if length > size:
        raise ValueError(f"{file.name} is damaged or cut short")
    header = file.read(length)
    yield header
    tensors = [info["data_offsets"] for name, info in json.loads(header).items() if name != "__metadata__"]
    pieces = [
        (8 + length + max(start, (start + end - SAMPLE_BYTES) // 2), min(SAMPLE_BYTES, end - start)) for start, end in tensors
    ]
    for at, count in pieces:  # asked for all at once: one by one, a cold disk's delays would add up
        os.posix_fadvise(file.fileno(), at, count, os.POSIX_FADV_WILLNEED)
    for at, count in pieces:
        yield os.pread(file.fileno(), count, at)
