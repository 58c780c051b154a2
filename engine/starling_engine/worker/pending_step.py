"""Steps that have been given to a device."""

from typing import Protocol

from starling_engine.step import StepPlan, StepResult
from starling_engine.worker.prompt_outputs import RunnableModel


class PendingStep(Protocol):
    """A step that was launched, and whose result has not come."""

    @property
    def ready(self) -> bool:
        """True when `finish` returns at once."""
        ...

    def finish(self) -> StepResult:
        """Waits for the device. Called once, by any thread, for one step after the other. Raises what went wrong there."""
        ...


class Runner(Protocol):
    """Carries out plans: one thread launches steps, in the order of their plans."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Gives a step to the device. Raises any error before the device has it."""
        ...

    def free_slot(self, slot: int) -> None: ...

    def on_sleep(self) -> None:
        """Weights and cache are gone: drops everything with their addresses, or a part of the model."""
        ...

    def on_wake(self, model: RunnableModel) -> None:
        """Weights and cache are back, at other addresses; `model` may be another object, the cache's tensors are the same."""
        ...


class Finished:
    """A step whose result is there."""

    ready = True

    def __init__(self, result: StepResult) -> None:
        self._result = result

    @property
    def failed(self) -> bool:
        return self._result.error is not None

    def finish(self) -> StepResult:
        return self._result
