"""Names and bytes of the tensors in a folder's files, read without torch: a config does not tell all that they do."""

import json
import mmap
import pickletools
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_COMPARED_BYTES = 1 << 20
_INDEX = "model.safetensors.index.json"
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, RecursionError, zipfile.BadZipFile, NotImplementedError)


def stored_names(folder: Path) -> Collection[str]:
    """Returns the names in safetensors, or else in pickles; more texts may be among these. None are in what cannot be read.

    The loader says what is wrong with files.
    """
    try:
        for index in (_INDEX, "pytorch_model.bin.index.json"):
            if (folder / index).exists():
                return _weight_map(folder / index)
            file = folder / index.removesuffix(".index.json")
            if file.exists():
                return _in_pickle(file) if file.suffix == ".bin" else _header(file)[0]
    except _UNREADABLE:
        pass
    return ()


def differ(folder: Path, one: str, other: str) -> bool:
    """Says if safetensors hold both tensors, with other shapes, types or bytes. What cannot be read does not differ."""
    try:
        index = folder / _INDEX
        single = index.with_name(_INDEX.removesuffix(".index.json"))
        names = _weight_map(index) if index.exists() else dict.fromkeys(_header(single)[0], single.name)
        if one not in names or other not in names:
            return False
        return not _same(folder / Path(names[one]).name, folder / Path(names[other]).name, one, other)
    except _UNREADABLE:
        return False


def _same(one_file: Path, other_file: Path, one: str, other: str) -> bool:
    (found, start), (others, other_start) = _header(one_file), _header(other_file)
    first, second = found[one], others[other]
    if (first["dtype"], first["shape"]) != (second["dtype"], second["shape"]):
        return False
    begin, end = first["data_offsets"]
    if start + end > one_file.stat().st_size:  # a header that lies; petabytes would be gone through
        return True
    shift = other_start + second["data_offsets"][0] - start - begin
    with (
        one_file.open("rb") as file,
        other_file.open("rb") as other_opened,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mine,
        mmap.mmap(other_opened.fileno(), 0, access=mmap.ACCESS_READ) as theirs,
    ):
        pieces = range(start + begin, start + end, _COMPARED_BYTES)
        ends = (min(at + _COMPARED_BYTES, start + end) for at in pieces)
        return all(mine[at:stop] == theirs[at + shift : stop + shift] for at, stop in zip(pieces, ends, strict=True))


def _weight_map(index: Path) -> dict[str, str]:
    return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Returns the header of a file of safetensors, and where its tensors' bytes begin."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        return dict(json.loads(file.read(min(size, _MAX_HEADER_BYTES)))), _LENGTH_BYTES + size


def _in_pickle(path: Path) -> Collection[str]:
    """Returns the texts of a pickle, which is not run."""
    with zipfile.ZipFile(path) as archive:
        (entry,) = (each for each in archive.infolist() if each.filename.endswith("/data.pkl"))
        if entry.file_size > _MAX_HEADER_BYTES:
            return ()
        return {argument for _, argument, _ in pickletools.genops(archive.read(entry)) if isinstance(argument, str)}
