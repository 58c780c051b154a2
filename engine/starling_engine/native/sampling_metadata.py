"""Sampling metadata of rows: a column for each parameter that scales or filters logits.

`SAMPLING_COLUMNS` is the one list of them. The host's batch, the device's step buffer and the kernels' arguments are made from it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor

from starling_engine.params import SamplingParams

Column = TypeVar("Column")
Other = TypeVar("Other")

GREEDY = SamplingParams(temperature=0.0)
"""Parameters of padding: the largest logit is taken, and nothing is filtered."""
MIN_TEMPERATURE = 1e-5
"""Smallest divisor of logits: a smaller one makes them overflow. Here the largest logit has all the probability."""


class SamplingMetadata(NamedTuple, Generic[Column]):
    """Columns of R rows. `native.reference.sample` defines what they do.

    temperature  [R] fp32; 0: the largest logit
    top_k        [R] int32; 0: off
    top_p        [R] fp32; 1: off
    min_p        [R] fp32; 0: off
    """

    temperature: Column
    top_k: Column
    top_p: Column
    min_p: Column

    def map(self, function: Callable[[Column], Other]) -> "SamplingMetadata[Other]":
        """Returns `function` of each column."""
        return SamplingMetadata(*map(function, self))


@dataclass(frozen=True, slots=True)
class SamplingColumn:
    """The type of a column, and what a request's parameters write to it."""

    dtype: torch.dtype
    read: Callable[[SamplingParams], float]


SAMPLING_COLUMNS = SamplingMetadata(
    temperature=SamplingColumn(torch.float32, lambda params: params.temperature and max(params.temperature, MIN_TEMPERATURE)),
    top_k=SamplingColumn(torch.int32, lambda params: max(params.top_k, 0)),
    top_p=SamplingColumn(torch.float32, lambda params: params.top_p),
    min_p=SamplingColumn(torch.float32, lambda params: params.min_p),
)


def sampling_metadata(rows: Sequence[SamplingParams], device: torch.device | str = "cpu") -> SamplingMetadata[Tensor]:
    """Makes the columns of some rows."""
    return SAMPLING_COLUMNS.map(lambda column: torch.tensor([column.read(row) for row in rows], dtype=column.dtype, device=device))


def write_rows(metadata: SamplingMetadata[npt.NDArray[Any]], rows: int | slice, params: SamplingParams) -> None:
    """Writes the same parameters to some rows, on the host."""
    for column, values in zip(SAMPLING_COLUMNS, metadata, strict=True):
        values[rows] = column.read(params)


def has_rows(metadata: SamplingMetadata[Tensor], count: int) -> bool:
    """Returns whether kernels can read `count` rows: each column is contiguous, and has its type."""
    return all(
        values.dtype == column.dtype and values.shape == (count,) and values.is_contiguous()
        for column, values in zip(SAMPLING_COLUMNS, metadata, strict=True)
    )
