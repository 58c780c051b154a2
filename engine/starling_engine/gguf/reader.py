"""The header of a GGUF file: its metadata, and where its tensors lie (ggml's docs/gguf.md). Imports no torch.

Everything is checked against the size of the file before memory is taken for it: files come from strangers.
"""

import mmap
import os
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from starling_engine.errors import ModelError

SUFFIX = ".gguf"
MAGIC = b"GGUF"
_PART = re.compile(r"-([0-9]{5})-of-([0-9]{5})\.gguf$")
_MOST_WRITTEN, MAX_PARTS = 99_999, 1000
"""The most files of a model that names can count, and that are read; published models have some hundreds at most."""
_POINTER, _LONGEST_POINTER = b"version https://git-lfs.github.com/spec/", 1024
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of numbers in the metadata, as `struct` has them."""
_FLOAT, _STRING, _ARRAY = 6, 8, 9
_LEAST_BYTES = {"entries": 13, "tensors": 24, "strings": 8}
"""Least bytes of one of them in the file."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of tensors, by ggml's number: `elements` of a row are `size` bytes."""

    number: int
    name: str
    elements: int
    size: int


BLOCK_TYPES = {
    number: BlockType(number, *fields)
    for number, fields in {
        0: ("F32", 1, 4),
        1: ("F16", 1, 2),
        2: ("Q4_0", 32, 18),
        3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34),
        10: ("Q2_K", 256, 84),
        11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210),
        20: ("IQ4_NL", 32, 18),
        23: ("IQ4_XS", 256, 136),
        30: ("BF16", 1, 2),
        39: ("MXFP4", 32, 17),
    }.items()
}
"""Types that can be read, by their number."""
OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16",
    26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip
"""Names of types that cannot be read."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor at byte `start` of `file`; `shape` in torch's order, the rows' elements last."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    start: int
    file: Path

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) // self.type.elements * self.type.size


class _Cursor:
    """Reads values one behind the other. Raises ModelError past the end."""

    def __init__(self, data: mmap.mmap, file: Path) -> None:
        self.data = data
        self.file = file
        self.at = 0

    def number(self, letter: str, what: str) -> Any:
        self.need(size := struct.calcsize(f"<{letter}"), what)
        (value,) = struct.unpack_from(f"<{letter}", self.data, self.at)
        self.at += size
        return value

    def count(self, things: str, what: str) -> int:
        """Reads how many there are, and checks that the file has room for as many."""
        count: int = self.number("Q", what)
        self.need(count * _LEAST_BYTES[things], f"{what}: {count} {things}")
        return count

    def text(self, what: str) -> str:
        self.need(length := self.number("Q", what), f"{what}: a string of {length} bytes")
        self.at += length
        try:
            return self.data[self.at - length : self.at].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fault(f"{what} is not UTF-8: {error}") from None

    def skip_texts(self, count: int, what: str) -> None:
        unpack, data, at, end = struct.Struct("<Q").unpack_from, self.data, self.at, len(self.data)
        for _ in range(count):
            if at + 8 > end:
                break
            at += 8 + unpack(data, at)[0]
        if at > end:
            raise self.fault(f"{what} goes beyond the end of the file")
        self.at = at

    def need(self, size: int, what: str) -> None:
        if size > len(self.data) - self.at:
            raise self.fault(f"{what} goes beyond the end of the file")

    def fault(self, text: str) -> ModelError:
        return ModelError(f"{self.file}: {text}; the file is damaged, or cut short")


@dataclass(frozen=True, slots=True)
class _Array:
    """An array of the metadata, read when it is asked for."""

    kind: int
    count: int
    start: int


class GgufFile:
    """The header of the file at `path`, and of others that it was joined with. Raises ModelError naming what is wrong with it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.is_file() and not path.stat().st_size:
            raise ModelError(f"{path} is empty; download it again")
        try:
            with path.open("rb") as file:
                self.stamp = stamp_of(os.fstat(file.fileno()))
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        cursor = _Cursor(self._data, path)
        tensors, entries = self._counts(cursor)
        self._values = self._read_entries(cursor, entries)
        self.tensors: Mapping[str, GgufTensor] = self._read_tensors(cursor, tensors)
        self._header_end = min((tensor.start for tensor in self.tensors.values()), default=len(self._data))
        self.parts: Mapping[Path, GgufFile] = {path: self}

    def join(self, others: Sequence["GgufFile"]) -> None:
        """Adds the tensors of the model's other files. Raises ModelError for files that are not all of one model."""
        count, tensors = self.get("split.count"), dict(self.tensors)
        count = 1 if count in (None, 0) else count
        if not isinstance(count, int) or not 0 < count <= _MOST_WRITTEN:
            raise ModelError(f"{self.path}: split.count must be an integer from 1 to {_MOST_WRITTEN}")
        if count != 1 + len(others):
            rule = f"a model in several files has names that end with -00001-of-{count:05}.gguf, and so on"
            raise ModelError(f"{self.path}: split.count is {count}, and there are {1 + len(others)} by its name; {rule}")
        for number, part in enumerate(others, 1):
            found = part.get("split.no"), part.get("split.count")
            if found != (number, count):
                raise ModelError(f"{part.path}: split.no and split.count are {found}; expected ({number}, {count})")
            if twice := tensors.keys() & part.tensors.keys():
                raise ModelError(f"{part.path}: {min(twice)} is in a file before it, too")
            tensors |= part.tensors
        self.tensors, self.parts = tensors, {each.path: each for each in (self, *others)}

    @property
    def size(self) -> int:
        """Bytes of the file itself, without others that it was joined with."""
        return len(self._data)

    def get(self, name: str) -> Any:
        """Returns a value of the metadata, an array as a list; None where there is none."""
        value = self._values.get(name)
        return self._read_array(name, value) if isinstance(value, _Array) else value

    def places_of(self, name: str, texts: Collection[str]) -> list[int]:
        """Returns where in an array of strings one of `texts` is, by ascending index, without making all of them."""
        array, wanted = self._values.get(name), {text.encode() for text in texts}
        if not isinstance(array, _Array) or array.kind != _STRING:
            return []
        # Their lengths were checked when the header was read.
        unpack, data, at, found = struct.Struct("<Q").unpack_from, self._data, array.start, []
        lengths = {len(each) for each in wanted}
        for index in range(array.count):
            (length,) = unpack(data, at)
            at += 8 + length
            if length in lengths and data[at - length : at] in wanted:
                found.append(index)
        return found

    def count_of(self, name: str) -> int:
        """Returns how many values an array has; 0 where there is none."""
        value = self._values.get(name)
        return value.count if isinstance(value, _Array) else 0

    def numbers_of(self, name: str, most: int) -> list[GgufTensor]:
        """Returns the first numbers of an array of 32-bit floats, `most` at most, each as a tensor of one element."""
        array = self._values.get(name)
        if not isinstance(array, _Array) or array.kind != _FLOAT:
            return []
        return [GgufTensor(name, (1,), BLOCK_TYPES[0], array.start + 4 * at, self.path) for at in range(min(array.count, most))]

    @cached_property
    def architecture(self) -> str:
        """llama.cpp's name of it. Raises ModelError."""
        found = self.get("general.architecture")
        if not isinstance(found, str):
            raise ModelError(f"{self.path}: general.architecture is missing or not a string")
        return found

    def read(self, tensor: GgufTensor) -> bytes:
        """Returns a copy of a tensor's bytes."""
        return self.parts[tensor.file]._data[tensor.start : tensor.start + tensor.num_bytes]

    def middle_of(self, tensor: GgufTensor, count: int) -> bytes:
        """Returns `count` bytes from the middle of a tensor; all of a smaller one."""
        start = tensor.start + max(0, tensor.num_bytes - count) // 2
        return self.parts[tensor.file]._data[start : start + min(count, tensor.num_bytes)]

    @property
    def header_bytes(self) -> bytes:
        """All that is not a tensor's."""
        return b"".join(part._data[: part._header_end] for part in self.parts.values())

    def _counts(self, cursor: _Cursor) -> tuple[int, int]:
        cursor.need(24, "the header")
        if self._data[:4] != MAGIC:
            found = pointer_of_lfs(self.path) or f"not a GGUF file: it begins with {self._data[:4]!r}"
            raise ModelError(f"{self.path} is {found}")
        cursor.at = 4
        version = cursor.number("I", "the version")
        if version not in VERSIONS:
            raise ModelError(f"{self.path} is GGUF version {version} (or big-endian); readable are 2 and 3, little-endian")
        return cursor.count("tensors", "the header"), cursor.count("entries", "the header")

    def _read_entries(self, cursor: _Cursor, count: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for index in range(count):
            name = cursor.text(f"entry {index}")
            kind = cursor.number("I", name)
            values[name] = self._read_value(cursor, name, kind)
        return values

    def _read_value(self, cursor: _Cursor, name: str, kind: int) -> Any:
        if kind in _NUMBERS:
            return cursor.number(_NUMBERS[kind], name)
        if kind == _STRING:
            return cursor.text(name)
        if kind != _ARRAY:
            raise cursor.fault(f"{name} has the unknown type {kind}")
        kind = cursor.number("I", name)
        if kind == _STRING:
            array = _Array(kind, cursor.count("strings", name), cursor.at)
            cursor.skip_texts(array.count, name)
            return array
        if kind not in _NUMBERS:
            raise cursor.fault(f"{name} is an array of the type {kind}, which cannot be read")
        count = cursor.number("Q", name)
        cursor.need(size := count * struct.calcsize(f"<{_NUMBERS[kind]}"), f"{name}: {count} numbers")
        array = _Array(kind, count, cursor.at)
        cursor.at += size
        return array

    def _read_array(self, name: str, array: _Array) -> list[Any]:
        if array.kind != _STRING:
            return list(struct.unpack_from(f"<{array.count}{_NUMBERS[array.kind]}", self._data, array.start))
        cursor = _Cursor(self._data, self.path)
        cursor.at = array.start
        return [cursor.text(name) for _ in range(array.count)]

    def _read_tensors(self, cursor: _Cursor, count: int) -> dict[str, GgufTensor]:
        alignment = self._values.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise cursor.fault(f"general.alignment is {alignment!r}")
        found: dict[str, tuple[tuple[int, ...], BlockType, int]] = {}
        for index in range(count):
            name = cursor.text(f"tensor {index}")
            if name in found:
                raise cursor.fault(f"{name} occurs twice")
            found[name] = self._read_tensor(cursor, name)
            if found[name][2] % alignment:
                raise cursor.fault(f"{name} is not aligned")
        begin = -(-cursor.at // alignment) * alignment
        tensors = {
            name: GgufTensor(name, shape, type_, begin + offset, self.path) for name, (shape, type_, offset) in found.items()
        }
        self._check_places(cursor, list(tensors.values()))
        return tensors

    def _read_tensor(self, cursor: _Cursor, name: str) -> tuple[tuple[int, ...], BlockType, int]:
        dimensions = cursor.number("I", name)
        if not 0 < dimensions <= MAX_DIMENSIONS:
            raise cursor.fault(f"{name} has {dimensions} dimensions; possible are 1 to {MAX_DIMENSIONS}")
        shape = tuple(reversed([cursor.number("Q", name) for _ in range(dimensions)]))
        if 0 in shape:
            raise cursor.fault(f"{name} {list(shape)} is empty")
        number, offset = cursor.number("I", name), cursor.number("Q", name)
        if number not in BLOCK_TYPES:
            kind = OTHER_TYPES.get(number, f"number {number}")
            known = ", ".join(each.name for each in BLOCK_TYPES.values())
            raise ModelError(f"{self.path}: {name} has the type {kind}, which cannot be read; readable are {known}")
        if shape[-1] % BLOCK_TYPES[number].elements:
            raise cursor.fault(f"{name} {list(shape)} has rows that are no whole blocks of {BLOCK_TYPES[number].name}")
        return shape, BLOCK_TYPES[number], offset

    def _check_places(self, cursor: _Cursor, tensors: list[GgufTensor]) -> None:
        in_order = sorted(tensors, key=lambda tensor: tensor.start)
        for tensor in in_order:
            if tensor.start + tensor.num_bytes > len(self._data):
                raise cursor.fault(f"{tensor.name} {list(tensor.shape)} goes beyond the end of the file")
        for before, after in pairwise(in_order):
            if before.start + before.num_bytes > after.start:
                raise cursor.fault(f"{before.name} and {after.name} overlap")


def open_gguf(path: Path) -> GgufFile:
    """Returns the file, joined with those that go on behind it; one that was read before, if all are still the same.

    Raises as `GgufFile`, and ModelError for a file that goes on behind another.
    """
    paths = tuple(parts_of(path))
    try:
        stamps = tuple(stamp_of(each.stat()) for each in paths)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return _read_once(paths, stamps)


def parts_of(path: Path) -> list[Path]:
    """Returns the files of the model of which `path` is the first, by its name: -00001-of-00003.gguf, and so on.

    Raises ModelError for the name of another one, and for more than MAX_PARTS.
    """
    match = _PART.search(path.name)
    if match is None or int(match[2]) < 2:
        return [path]
    number, count = int(match[1]), int(match[2])
    if count > MAX_PARTS:
        raise ModelError(f"{path} is file {number} of {count} of a model; at most {MAX_PARTS} are read")
    parts = [path.with_name(f"{path.name[: match.start()]}-{part:05}-of-{match[2]}{SUFFIX}") for part in range(1, count + 1)]
    if number != 1:
        raise ModelError(f"{path} is file {number} of {count} of a model; name the first one, {parts[0].name}")
    return parts


def stamp_of(status: os.stat_result) -> tuple[int, ...]:
    """Returns what changes when a file does, or another one takes its name."""
    return status.st_size, status.st_mtime_ns, status.st_ino


@lru_cache(maxsize=2)
def _read_once(paths: tuple[Path, ...], _stamps: tuple[tuple[int, ...], ...]) -> GgufFile:
    first, *others = map(GgufFile, paths)
    first.join(others)
    return first


def is_gguf(path: Path) -> bool:
    """Returns whether the model at `path` is a GGUF file, maybe the first of several, and no folder."""
    return path.suffix == SUFFIX and not path.is_dir()


def pointer_of_lfs(path: Path) -> str:
    """Says what to do with a file that Git LFS has left its pointer for, as a clone without LFS has; empty for any other file."""
    if not path.is_file() or path.stat().st_size > _LONGEST_POINTER or not path.read_bytes().startswith(_POINTER):
        return ""
    return "a pointer of Git LFS, and not the file itself; get that by git lfs pull"
