"""A step's inputs on the device: one copy, to the same memory for every step of the same size."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from starling_engine.kernels.attention_plan import QueryBlocks
from starling_engine.native.sampling_metadata import SAMPLING_COLUMNS, SamplingMetadata
from starling_engine.platforms.device_queue import DeviceQueue
from starling_engine.worker.device.pinned import ENTRIES, PinnedRing

ALIGNMENT = 16
CACHED_SHAPES = 256
"""Shapes whose views are cached: those of recorded steps come again, while prompts have many lengths."""
Host = npt.NDArray[np.generic]
Array = TypeVar("Array", torch.Tensor, Host)


class StepShape(NamedTuple):
    """Tokens, rows and samples of a step, padding included.

    `width` is the most tokens of a row, where all are sampled behind, as in decodes: 1, or more with drafts. 0: rows of any kind.
    """

    tokens: int
    rows: int
    samples: int
    width: int = 0


@dataclass(slots=True)
class StepFields(Generic[Array]):
    """Inputs of a step of T tokens in R rows, with S samples, in G KV groups.

    The host sends

    ids            [T + 1] int64; those that only the device knows are filled in by it
    token_rows     [T] int64, each token's row
    query_start    [R + 1] int32
    slots          [R] int64, of the batch
    starts         [R] int64, the position of a row's first token, or FOLLOWS
    feed_slots     [R] int64, whose last sampled token goes to ids[feed_at]
    feed_at        [R] int64, T for a row whose tokens are known
    sampled        [S] int64, the step's token behind which is sampled
    sampled_slots  [S] int64
    seeds          [S] int64; `sampling_metadata` has [S] too
    first          [S] int64, for each row that is sampled from, its first sample
    num_drafts     [S] int64, for each of these rows
    places         [G * R] int64, where new blocks belong in the tables (see `NewBlocks`); padding's own where there are fewer
    blocks         [G * R] int32, these blocks
    query_blocks   [N, 2] int32, as in AttentionMetadata, filled up with -1; N is 0 where attention takes no list, or needs none

    and the device, which knows where rows are, adds

    positions      [T] int64
    targets        [G, T] int64, slots in the cache, as in AttentionMetadata
    context_lens   [R] int32
    ends           [S] int64, the position of the sampled token
    """

    ids: Array
    token_rows: Array
    query_start: Array
    slots: Array
    starts: Array
    feed_slots: Array
    feed_at: Array
    sampled: Array
    sampled_slots: Array
    seeds: Array
    first: Array
    num_drafts: Array
    places: Array
    blocks: Array
    query_blocks: Array
    positions: Array
    targets: Array
    context_lens: Array
    ends: Array
    sampling_metadata: SamplingMetadata[Array]

    def samples(self, rows: int, count: int) -> "StepFields[Array]":
        """Returns the step with only the first `rows` rows that are sampled from, and their `count` samples."""
        metadata = self.sampling_metadata.map(lambda column: column[:count])
        named = {name: getattr(self, name)[:count] for name in ("sampled", "sampled_slots", "seeds", "ends")}
        return replace(self, **named, first=self.first[:rows], num_drafts=self.num_drafts[:rows], sampling_metadata=metadata)


Dimensions = dict[str, tuple[tuple[int, ...], torch.dtype]]


def room_for_blocks(shape: StepShape, groups: int) -> int:
    """Returns how many new blocks a step can take along: one for each row and group, as decodes need them now and then."""
    return groups * shape.rows


def _host_dimensions(shape: StepShape, groups: int, listing: QueryBlocks | None) -> Dimensions:
    """Returns size and dtype of each field that the host sends."""
    tokens, rows, samples, width = shape
    query_blocks = 0 if listing is None or 0 < width <= listing.decodes else listing.most(tokens, rows)
    new = (room_for_blocks(shape, groups),)
    return {
        "ids": ((tokens + 1,), torch.int64),
        "token_rows": ((tokens,), torch.int64),
        "query_start": ((rows + 1,), torch.int32),
        **dict.fromkeys(("slots", "starts", "feed_slots", "feed_at"), ((rows,), torch.int64)),
        **dict.fromkeys(("sampled", "sampled_slots", "seeds", "first", "num_drafts"), ((samples,), torch.int64)),
        "places": (new, torch.int64),
        "blocks": (new, torch.int32),
        "query_blocks": ((query_blocks, 2), torch.int32),
        **{name: ((samples,), column.dtype) for name, column in SAMPLING_COLUMNS._asdict().items()},
    }


def _dimensions(shape: StepShape, groups: int, listing: QueryBlocks | None) -> Dimensions:
    """Returns size and dtype of each field, those that the host sends first."""
    return _host_dimensions(shape, groups, listing) | {
        "positions": ((shape.tokens,), torch.int64),
        "targets": ((groups, shape.tokens), torch.int64),
        "context_lens": ((shape.rows,), torch.int32),
        "ends": ((shape.samples,), torch.int64),
    }


def _fields(arrays: dict[str, Array]) -> StepFields[Array]:
    """Returns the arrays, which have the names of `_dimensions`, as fields."""
    metadata = SamplingMetadata(*(arrays.pop(name) for name in SamplingMetadata._fields))
    return StepFields(**arrays, sampling_metadata=metadata)


def _views(memory: torch.Tensor, dimensions: Dimensions) -> dict[str, torch.Tensor]:
    """Returns a view of `memory` (uint8) for each field."""
    views, at = {}, 0
    for name, (size, dtype) in dimensions.items():
        count = math.prod(size) * dtype.itemsize
        views[name] = memory[at : at + count].view(dtype).view(size)
        at += _aligned(count)
    return views


def _num_bytes(dimensions: Dimensions) -> int:
    return sum(_aligned(math.prod(size) * dtype.itemsize) for size, dtype in dimensions.values())


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


class StepBuffer:
    """Room for a step of `largest`. The memory on the device never moves, as recorded steps require.

    `listing` is how attention wants query blocks listed; None where it takes no list.
    """

    def __init__(
        self, queue: DeviceQueue, device: torch.device, largest: StepShape, groups: int, listing: QueryBlocks | None = None
    ) -> None:
        size = _num_bytes(_dimensions(largest, groups, listing))
        self._ring = PinnedRing(queue, size)
        self._memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self._layout = groups, listing
        self._host = self._memory
        self._views = lru_cache(CACHED_SHAPES)(self._make_views)
        self._arrays = lru_cache(ENTRIES * CACHED_SHAPES)(self._make_arrays)

    def host(self, shape: StepShape) -> StepFields[Host]:
        """Returns the fields to fill in for the next `send`; they still hold another step."""
        self._host = self._ring.take()
        return self._arrays(self._host, shape)

    def send(self, shape: StepShape) -> StepFields[torch.Tensor]:
        """Copies the host's fields to the device, in its queue; returns all fields there."""
        used = _num_bytes(_host_dimensions(shape, *self._layout))
        self._memory[:used].copy_(self._host[:used], non_blocking=True)
        self._ring.given()
        return self._views(shape)

    def _make_views(self, shape: StepShape) -> StepFields[torch.Tensor]:
        return _fields(_views(self._memory, _dimensions(shape, *self._layout)))

    def _make_arrays(self, host: torch.Tensor, shape: StepShape) -> StepFields[Host]:
        return _fields({name: view.numpy() for name, view in _views(host, _dimensions(shape, *self._layout)).items()})
