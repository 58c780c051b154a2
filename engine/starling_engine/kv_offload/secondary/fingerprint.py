"""The fingerprint of a model: the weights, dtype and layout that keys and values were computed with.

It outlives processes and machines, so it comes from the content of the model's files, never from their path or dates.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from starling_engine.config import QUANTIZATION_VERSION
from starling_engine.errors import ModelError
from starling_engine.gguf.reader import is_gguf, open_gguf
from starling_engine.model_config.quantization import read_config_json, read_quantization

KV_LAYOUT = 3
"""Version of the order of a chunk's keys and values, of their meaning (rotated keys), of `identity`, and of `layout`."""

SAMPLE_BYTES = 256
"""Read of each tensor, from its middle."""
PIECES, END_BYTES = 256, 1 << 20
"""Read of a file that is no safetensors: so many pieces, and its end."""


@dataclass(frozen=True)
class Fingerprint:
    """`model` is for people; `identity`, `dtype` and `layout` make the digest. `layout` says what a chunk of each KV group has."""

    model: str
    identity: str
    dtype: str
    layout: str = ""

    @property
    def digest(self) -> bytes:
        """32 bytes, SHA-256."""
        return sha256(repr((self.identity, self.dtype, KV_LAYOUT, self.layout)).encode()).digest()


def fingerprint_of(model_path: str, load_format: str, seed: int, dtype: str) -> Fingerprint:
    """Returns the fingerprint of the model at `model_path`, as WorkerConfig names it.

    Takes milliseconds: it reads a few bytes of each tensor. Raises ModelError when the files cannot be read.
    """
    folder = Path(model_path)
    try:
        if is_gguf(folder):
            return _of_gguf(folder, load_format, seed, dtype)
        if load_format == "dummy":
            return Fingerprint(f"{folder.name} (dummy weights)", f"dummy {seed} {_config_hash(folder)}", dtype)
        repository, content = _hub_name(folder), _content_hash(folder, "*.bin" if load_format == "pt" else "*.safetensors")
        if read_quantization(read_config_json(folder)) is not None:
            content = f"{content} (version {QUANTIZATION_VERSION})"
        # A branch led to this commit. The files may have been edited since.
        return Fingerprint(repository or folder.name, content if repository is None else f"{repository} {content}", dtype)
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ModelError(f"{folder} has no fingerprint, its files cannot be read: {error!r}") from error


def _of_gguf(path: Path, load_format: str, seed: int, dtype: str) -> Fingerprint:
    file = open_gguf(path)
    digest = sha256(file.header_bytes)
    if load_format == "dummy":
        return Fingerprint(f"{path.name} (dummy weights)", f"dummy {seed} {digest.hexdigest()}", dtype)
    for tensor in file.tensors.values():
        digest.update(file.middle_of(tensor, SAMPLE_BYTES))
    return Fingerprint(path.name, f"{digest.hexdigest()} (version {QUANTIZATION_VERSION})", dtype)


def _hub_name(folder: Path) -> str | None:
    """Returns `org/name@commit` for a snapshot in the hub's cache: models--org--name/snapshots/commit."""
    repository = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not repository.startswith("models--"):
        return None
    return f"{repository.removeprefix('models--').replace('--', '/')}@{folder.name}"


def _config_hash(folder: Path) -> str:
    return sha256((folder / "config.json").read_bytes()).hexdigest()


def _content_hash(folder: Path, files: str) -> str:
    """Hashes the middle of each tensor, too: fine-tunes of one shape differ there."""
    digest = sha256(_config_hash(folder).encode())
    samples = _samples if files.endswith(".safetensors") else _samples_of_any
    for path in sorted(folder.glob(files)):
        digest.update(repr((path.name, path.stat().st_size)).encode())
        with path.open("rb", buffering=0) as file:
            for piece in samples(file, path.stat().st_size):
                digest.update(piece)
    return digest.hexdigest()


def _samples_of_any(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yields pieces of a file of another format, and its end, where an archive lists what it holds with checksums."""
    yield from (os.pread(file.fileno(), SAMPLE_BYTES, size * number // PIECES) for number in range(PIECES))
    yield os.pread(file.fileno(), END_BYTES, max(0, size - END_BYTES))


def _samples(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yields the header of a safetensors file, and the middle of each tensor; all of a small one, such as a scale."""
    length = int.from_bytes(file.read(8), "little")
    if length > size:
        raise ValueError(f"{file.name} is damaged or cut short")
    header = file.read(length)
    yield header
    tensors = [info["data_offsets"] for name, info in json.loads(header).items() if name != "__metadata__"]
    pieces = [
        (8 + length + max(start, (start + end - SAMPLE_BYTES) // 2), min(SAMPLE_BYTES, end - start)) for start, end in tensors
    ]
    for at, count in pieces:  # requested all at once: one by one, a cold disk's delays would add up
        os.posix_fadvise(file.fileno(), at, count, os.POSIX_FADV_WILLNEED)
    for at, count in pieces:
        yield os.pread(file.fileno(), count, at)
