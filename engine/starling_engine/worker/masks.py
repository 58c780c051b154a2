"""The way of masks to a rank that samples: they come while its step runs."""

import queue
import time
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from starling_engine.step import StepMasks, StepPlan, StepResult
from starling_engine.worker.host.batch import Samples

MASK_SECONDS = 10.0
"""Time in which the masks of a step have to come once it waits for them. Rows without end with an error."""
NO_MASK = "the mask of the tokens that it may sample did not come"


class MaskSource(Protocol):
    """Receives masks, in the order of their steps."""

    def receive(self, timeout: float) -> StepMasks | None:
        """Returns the next ones; None after `timeout` seconds."""
        ...


class MaskQueue:
    """A source for a rank that is a thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[StepMasks] = queue.SimpleQueue()

    def put(self, masks: StepMasks) -> None:
        self._queue.put(masks)

    def receive(self, timeout: float) -> StepMasks | None:
        try:
            return self._queue.get(timeout=timeout)
        except queue.Empty:
            return None


class Masked(NamedTuple):
    """Samples of a step that have a mask, `at` [M], and the masks' words [M, ceil(vocab / 32)], in the memory that came."""

    at: npt.NDArray[np.int64]
    words: npt.NDArray[np.int32]


class StepMasking:
    """Gives a runner the masks of a step's samples."""

    def __init__(self, source: MaskSource) -> None:
        self._source = source

    def of(self, plan: StepPlan, samples: Samples, result: StepResult) -> Masked | None:
        """Waits for a step's masks; None for a step without any. A masked row without a mask gets an error."""
        if not plan.masked:
            return None
        masks = self._wait(plan.step_id)
        rows = masks.rows if masks is not None else []
        for row in set(plan.masked).difference(rows):
            result.extras_of(row).error = NO_MASK
        if masks is None or not rows:
            return None
        at = samples.of(rows)
        return Masked(at, np.frombuffer(masks.bits, np.int32).reshape(len(at), -1))

    def _wait(self, step_id: int) -> StepMasks | None:
        """Returns a step's masks; those of steps before it, which failed, are dropped."""
        end = time.monotonic() + MASK_SECONDS
        while (masks := self._source.receive(max(0.0, end - time.monotonic()))) is not None:
            if masks.step_id == step_id:
                return masks
        return None
