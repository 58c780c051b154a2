"""A step that a device has been given, and what the host knows of it."""

import time

import torch

from starling_engine.platforms.queue import Mark
from starling_engine.step import RowResult, StepPlan, StepResult
from starling_engine.worker.device.readback import Readback
from starling_engine.worker.host.batch import SlotState
from starling_engine.worker.host.sampler import fill_in


class OnDevice:
    """A step that the device has been given. `rows` are the results as far as the host knows them; of `sampled` the tokens come."""

    ready = False

    def __init__(self, plan: StepPlan, began: float, mark: Mark, rows: list[RowResult], before: "OnDevice | None") -> None:
        self._plan = plan
        self._began = began
        self._mark = mark
        self._rows = rows
        self._before = before
        self._ended = 0.0
        self.sampled: list[int] = []
        self.output: torch.Tensor | None = None
        """[samples, 2] int64 in pinned memory: tokens, and whether their logits are finite."""
        self.places: list[tuple[int, SlotState, int]] = []
        """Of each sample the slot, who is in it, and the position."""
        self.tokens: list[int] | None = None
        self.answers: Readback | None = None
        """What fills in more of `rows`."""

    def wait(self) -> None:
        """Until its tokens are known."""
        self._mark.wait()
        if self.tokens is None and self.output is not None:
            self.tokens = self.output[:, 0].tolist()

    def finish(self) -> StepResult:
        self.wait()
        self._ended = time.perf_counter()
        if self.output is not None:
            assert self.tokens is not None
            fill_in((self._rows[r] for r in self.sampled), self.tokens, self.output[:, 1].bool().tolist())
        if self.answers is not None:
            self.answers.read()
        # The device had the one before to do first.
        began = self._began if self._before is None else max(self._began, self._before._ended)
        self._before = None
        return StepResult(self._plan.step_id, self._plan.epoch, self._rows, self._ended - began)
