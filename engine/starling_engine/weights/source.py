"""A source of weights: the tensors in a checkpoint's files, whatever their format, under the names of a model of transformers."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from starling_engine.native.group_quantized import Format, GroupQuantized

Index = tuple[int | slice, ...]
"""Part of a tensor, from the first dimension on; an empty one is all of it."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint.

    dtype          as the format names it
    element_bytes  in the file; None where the dtype cannot be loaded
    form           how its codes are read, if it is quantized
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    element_bytes: float | None
    form: Format | None = None


class TensorReader(Protocol):
    """Reads tensors of one open file. What it returns may be a map of the file, which is closed with it."""

    def read(self, name: str, index: Index) -> torch.Tensor:
        """Returns numbers, dequantized where the file has codes."""
        ...


@runtime_checkable
class CodeReader(TensorReader, Protocol):
    """Reads tensors of files in which some have a `form`."""

    def read_codes(self, name: str, index: Index) -> GroupQuantized:
        """Returns a matrix that has a `form`. Columns are cut between its groups."""
        ...


class WeightFiles(Protocol):
    """The headers of a checkpoint's files, read and checked."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def open(self, file: Path) -> AbstractContextManager[TensorReader]:
        """Opens one of the files that `tensors` name. Raises WeightError when it cannot be read, then or while it is open."""
        ...
