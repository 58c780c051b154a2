"""A step's inputs on the device: one copy, to the same memory for every step of the same size."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from starling_engine.native.sampling_metadata import SAMPLING_COLUMNS, SamplingMetadata
from starling_engine.platforms.device_queue import DeviceQueue
from starling_engine.worker.device.pinned import ENTRIES, PinnedRing

ALIGNMENT = 16
CACHED_SHAPES = 256
"""Shapes whose views are cached: those of recorded steps come again, while prompts have many lengths."""
SAMPLED = ("sampled", "sampled_slots", "ends", "seeds")
"""Fields with an element for each row that is sampled from, besides the sampling metadata; the rest is undefined."""
Host = npt.NDArray[np.generic]
Array = TypeVar("Array", torch.Tensor, Host)


class StepShape(NamedTuple):
    """Tokens and rows of a step, padding included. `decode`: each row has one token and samples one."""

    tokens: int
    rows: int
    decode: bool = False


@dataclass(slots=True)
class StepFields(Generic[Array]):
    """Inputs of a step of T tokens in R rows, some of which are sampled from, in G KV groups.

    ids            [T + 1] int64; tokens of steps whose results the host does not have yet are filled in by the device
    positions      [T] int64
    targets        [G, T] int64, slots in the cache, as in AttentionMetadata
    query_start    [R + 1] int32
    context_lens   [R] int32
    slots          [R] int64, of the batch
    feed_slots     [R] int64, whose last sampled token goes to ids[feed_at]
    feed_at        [R] int64, T for a row whose tokens are known
    last           [R] int64, each row's last token
    sampled        [R] int64, rows that are sampled from; this field and the next ones have as many elements, the rest is padding
    sampled_slots  [R] int64
    ends           [R] int64, the position of the new token
    seeds          [R] int64; `sampling_metadata` has [R] too
    """

    ids: Array
    positions: Array
    targets: Array
    query_start: Array
    context_lens: Array
    slots: Array
    feed_slots: Array
    feed_at: Array
    last: Array
    sampled: Array
    sampled_slots: Array
    ends: Array
    seeds: Array
    sampling_metadata: SamplingMetadata[Array]

    def samples(self, count: int) -> "StepFields[Array]":
        """Returns the step with only the first `count` samples."""
        metadata = self.sampling_metadata.map(lambda column: column[:count])
        return replace(self, **{name: getattr(self, name)[:count] for name in SAMPLED}, sampling_metadata=metadata)


def _dimensions(shape: StepShape, groups: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    tokens, rows, _ = shape
    return {
        "ids": ((tokens + 1,), torch.int64),
        "positions": ((tokens,), torch.int64),
        "targets": ((groups, tokens), torch.int64),
        "query_start": ((rows + 1,), torch.int32),
        "context_lens": ((rows,), torch.int32),
        **dict.fromkeys(("slots", "feed_slots", "feed_at", "last", *SAMPLED), ((rows,), torch.int64)),
        **{name: ((rows,), column.dtype) for name, column in SAMPLING_COLUMNS._asdict().items()},
    }


def _fields(arrays: dict[str, Array]) -> StepFields[Array]:
    """Returns the arrays, which have the names of `_dimensions`, as fields."""
    metadata = SamplingMetadata(*(arrays.pop(name) for name in SamplingMetadata._fields))
    return StepFields(**arrays, sampling_metadata=metadata)


def _views(memory: torch.Tensor, shape: StepShape, groups: int) -> dict[str, torch.Tensor]:
    """Returns a view of `memory` (uint8) for each field."""
    views, at = {}, 0
    for name, (size, dtype) in _dimensions(shape, groups).items():
        count = math.prod(size) * dtype.itemsize
        views[name] = memory[at : at + count].view(dtype).view(size)
        at += _aligned(count)
    return views


def _num_bytes(shape: StepShape, groups: int) -> int:
    return sum(_aligned(math.prod(size) * dtype.itemsize) for size, dtype in _dimensions(shape, groups).values())


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


class StepBuffer:
    """Room for a step of `largest`. The memory on the device never moves, as recorded steps require."""

    def __init__(self, queue: DeviceQueue, device: torch.device, largest: StepShape, groups: int) -> None:
        size = _num_bytes(largest, groups)
        self._ring = PinnedRing(queue, size)
        self._memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self._groups = groups
        self._host = self._memory
        self._views = lru_cache(CACHED_SHAPES)(self._make_views)
        self._arrays = lru_cache(ENTRIES * CACHED_SHAPES)(self._make_arrays)

    def host(self, shape: StepShape) -> StepFields[Host]:
        """Returns the fields to fill in for the next `send`; they still hold another step."""
        self._host = self._ring.take()
        return self._arrays(self._host, shape)

    def send(self, shape: StepShape) -> StepFields[torch.Tensor]:
        """Copies the fields to the device, in its queue; returns them there."""
        used = _num_bytes(shape, self._groups)
        self._memory[:used].copy_(self._host[:used], non_blocking=True)
        self._ring.given()
        return self._views(shape)

    def _make_views(self, shape: StepShape) -> StepFields[torch.Tensor]:
        return _fields(_views(self._memory, shape, self._groups))

    def _make_arrays(self, host: torch.Tensor, shape: StepShape) -> StepFields[Host]:
        return _fields({name: view.numpy() for name, view in _views(host, shape, self._groups).items()})
