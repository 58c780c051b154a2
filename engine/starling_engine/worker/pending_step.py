"""Steps that have been given to a device."""

from typing import Protocol

from starling_engine.step import StepPlan, StepResult
from starling_engine.worker.prompt_outputs import RunnableModel


class PendingStep(Protocol):
    """A step on its way."""

    @property
    def ready(self) -> bool:
        """Whether `finish` returns at once."""
        ...

    def finish(self) -> StepResult:
        """Waits for the device. Called once, by any thread, for one step after the other. Raises what went wrong there."""
        ...


class Runner(Protocol):
    """Steps are launched in the order of their plans, by one thread."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Raises what goes wrong before the device has it."""
        ...

    def free_slot(self, slot: int) -> None: ...

    def on_sleep(self) -> None:
        """Weights and cache have gone: whatever keeps their addresses or a part of the model is to be dropped here."""
        ...

    def on_wake(self, model: RunnableModel) -> None:
        """All is there again, at other addresses than before; `model` may be another object, the cache's tensors are the same."""
        ...


class Finished:
    """A step whose result is there already."""

    ready = True

    def __init__(self, result: StepResult) -> None:
        self._result = result

    @property
    def failed(self) -> bool:
        return self._result.error is not None

    def finish(self) -> StepResult:
        return self._result
