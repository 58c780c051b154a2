"""A try at a step, whose failure is a result like others."""

import logging
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch

from starling_engine.errors import DeviceLost, RankLost
from starling_engine.kv_offload.transfers import TransferThreads
from starling_engine.step import StepPlan, StepResult
from starling_engine.worker.pending_step import Finished, PendingStep

logger = logging.getLogger("starling.worker")
T = TypeVar("T")


class GuardedStep:
    """Launches a step by `launch` as it is made; reports to `transfers` when the step has ended."""

    def __init__(
        self,
        plan: StepPlan,
        rank: int,
        device: torch.device,
        transfers: TransferThreads | None,
        launch: Callable[[StepPlan], PendingStep],
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._device = device
        self._transfers = transfers
        self._launched = self._guarded(lambda: launch(plan), Finished)

    @property
    def failed(self) -> bool:
        """True when it failed as it was launched."""
        return isinstance(self._launched, Finished) and self._launched.failed

    @property
    def ready(self) -> bool:
        return self._launched.ready

    def finish(self) -> StepResult:
        try:
            return self._guarded(self._launched.finish, lambda failed: failed)
        finally:
            if self._transfers is not None:
                self._transfers.finished(self._plan.step_id)

    def _check_device(self) -> None:
        """Raises DeviceLost for a device that is lost: libraries report that in errors of their own."""
        if self._device.type == "cuda":
            try:
                torch.cuda.synchronize(self._device)  # of a thread that answers, the current one is another
            except RuntimeError as error:
                raise DeviceLost(f"the device of rank {self._rank} failed: {error}") from error

    def _guarded(self, act: Callable[[], T], failed: Callable[[StepResult], T]) -> T:
        """Returns `act()`, or where that fails, `failed` of the result with its error."""
        try:
            return act()
        except RankLost:
            raise
        except torch.AcceleratorError as error:
            raise DeviceLost(f"the device of rank {self._rank} failed: {error}") from error
        except Exception as error:  # noqa: BLE001 - a step's fault is pinned on its requests by the scheduler
            self._check_device()
            logger.error("step %d failed on rank %d:\n%s", self._plan.step_id, self._rank, traceback.format_exc())
            return failed(StepResult(self._plan.step_id, self._plan.epoch, error=f"{type(error).__name__}: {error}"))
