"""Names of the tensors in a folder's files, read without torch: a config does not tell all that they do."""

import json
import pickletools
import zipfile
from collections.abc import Collection
from pathlib import Path

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000


def stored_names(folder: Path) -> Collection[str]:
    """Returns the names in safetensors, or else in pickles; more texts may be among these. None are in what cannot be read.

    The loader says what is wrong with files.
    """
    try:
        for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
            if (folder / index).exists():
                return dict.fromkeys(json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"])
            file = folder / index.removesuffix(".index.json")
            if file.exists():
                return _in_pickle(file) if file.suffix == ".bin" else _in_header(file)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, zipfile.BadZipFile, NotImplementedError):
        pass
    return ()


def _in_header(path: Path) -> Collection[str]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        return dict.fromkeys(json.loads(file.read(min(size, _MAX_HEADER_BYTES))))


def _in_pickle(path: Path) -> Collection[str]:
    """Returns the texts of a pickle, which is not run."""
    with zipfile.ZipFile(path) as archive:
        (entry,) = (each for each in archive.infolist() if each.filename.endswith("/data.pkl"))
        if entry.file_size > _MAX_HEADER_BYTES:
            return ()
        return {argument for _, argument, _ in pickletools.genops(archive.read(entry)) if isinstance(argument, str)}
