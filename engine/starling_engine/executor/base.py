"""The interface between the engine core and the workers."""

from typing import Protocol

from starling_engine.step import StepPlan, StepResult
from starling_engine.worker.commands import Command, Reply
from starling_engine.worker.messages import Phase, WorkerReport


class Executor(Protocol):
    """The ranks of one core. Plans run in the order of submission; results come back in the same order.

    All else goes over the control channel: `send` a command to all ranks, and get their merged `replies`.
    """

    @property
    def progress(self) -> int:
        """Grows while work advances, also inside a step; a supervisor watches it."""
        ...

    @property
    def phase(self) -> Phase: ...

    @property
    def joining(self) -> str:
        """Address that ranks on other nodes have to join; empty where there are none."""
        ...

    def start(self) -> None:
        """Begins to load; returns at once."""
        ...

    def ready(self, timeout: float) -> WorkerReport | None:
        """Returns the report once the workers are ready, None after `timeout` seconds. Raises the error that ended the loading."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Hands a plan over without waiting. At most the queue depth may be in flight."""
        ...

    def collect(self, timeout: float) -> StepResult | None:
        """Returns the oldest result that was not collected yet; None after `timeout` seconds, or when there are replies."""
        ...

    def send(self, command: Command) -> None:
        """Sends a command to all ranks, behind the plans that were submitted; transfers go beside them. Does not wait.

        Commands of epochs are only for a core that steps with others. Memory orders are sent one after the other, each once no step
        is in flight.
        """
        ...

    def replies(self, timeout: float = 0.0) -> list[Reply]:
        """Returns all replies since the last call, each merged over the ranks; waits for the first at most `timeout` seconds."""
        ...

    def check(self) -> None:
        """Raises RankLost when a worker is gone, also while nothing is in flight. Cheap enough for every turn of a loop."""
        ...

    def shutdown(self) -> None: ...
