"""The seam between the engine core and the workers."""

from typing import Protocol

from starling_engine.kv_offload.orders import Order, TierStatus, TransferDone
from starling_engine.sleep import MemoryOrderDone, RestOrder
from starling_engine.step import StepPlan, StepResult
from starling_engine.topology.epoch import Balance, EpochAnswer, EpochOrder, Rearranged
from starling_engine.worker.report import Phase, WorkerReport


class Executor(Protocol):
    """Plans run in the order of submission; results come back in the same order."""

    @property
    def progress(self) -> int:
        """Grows while work advances, also inside a step; a supervisor watches it."""
        ...

    @property
    def phase(self) -> Phase: ...

    @property
    def store_port(self) -> int:
        """Where rank 0 serves the store in which ranks find each other; 0 until it has joined, and where there is none."""
        ...

    @property
    def joining(self) -> str:
        """Where ranks on other nodes have to join; empty where there are none."""
        ...

    def start(self) -> None:
        """Begins to load; returns at once."""
        ...

    def ready(self, timeout: float) -> WorkerReport | None:
        """The report once the workers are ready, None when `timeout` seconds passed. Raises what ended the loading."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Hands a plan over without waiting. At most the queue depth may be in flight."""
        ...

    def collect(self, timeout: float) -> StepResult | None:
        """The oldest result that was not collected yet, or None when `timeout` seconds passed, or chunks have moved meanwhile."""
        ...

    def idle(self) -> None:
        """Says that no plan follows the last one at once."""
        ...

    def order(self, order: EpochOrder) -> None:
        """Passes an order on to all workers; only for a core that steps with others."""
        ...

    def answers(self) -> list[EpochAnswer]:
        """What all workers have answered since the last call."""
        ...

    def balances(self) -> list[Balance | Rearranged]:
        """What workers have told of their experts since the last call."""
        ...

    def rest(self, order: RestOrder) -> None:
        """Has all ranks give memory back, or take it again. Comes after all steps, and the next one after `rested` has answered."""
        ...

    def rested(self) -> MemoryOrderDone | None:
        """What came of it, once all ranks have answered."""
        ...

    def move(self, orders: list[Order]) -> None:
        """Has chunks moved on all ranks, beside the steps."""
        ...

    def moved(self, timeout: float) -> list[TransferDone]:
        """What all ranks have moved, or could not, since the last call; waits for the first one at most `timeout` seconds."""
        ...

    def standing(self) -> TierStatus | None:
        """How the tiers outside stand on all ranks, where that has changed since the last call without anything being moved."""
        ...

    def check(self) -> None:
        """Raises RankLost when a worker is gone, also while nothing is in flight. Cheap enough for every turn of a loop."""
        ...

    def shutdown(self) -> None: ...
