"""A digest that differs between two checkpoints, made without reading their weights."""

import hashlib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from starling_engine.weights.hub import ALLOWED

WEIGHTS = ".safetensors"
LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header, little-endian."""
MAX_BYTES = 64 << 20
"""The most that is read of one file; a header, or a tokenizer, is smaller."""


def weights_digest(folder: Path) -> str:
    """Returns the SHA-256, in hex, of names, sizes, headers of weights and content of all other files. Raises OSError."""
    digest = hashlib.sha256()
    for path in _files(folder):
        with path.open("rb") as content:
            length = MAX_BYTES
            if path.suffix == WEIGHTS:
                length = min(LENGTH_BYTES + int.from_bytes(content.read(LENGTH_BYTES), "little"), MAX_BYTES)
                content.seek(0)
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            digest.update(content.read(length))
    return digest.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    """Yields the files that a download would bring, in the order of their names."""
    return (path for path in sorted(folder.iterdir()) if path.is_file() and any(fnmatch(path.name, each) for each in ALLOWED))
