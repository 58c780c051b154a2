"""What a worker says of itself. Imports no torch."""

from dataclasses import dataclass

from starling_engine.kv.spec import KVGroup
from starling_engine.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Phase:
    """What a worker that is not ready does; `done` of `total` bytes, where that is known."""

    name: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class WorkerReport:
    """What workers that are ready tell their core. `seconds`, by rank, is how long each step of a worker's life so far took.

    `async_scheduling` and `step_target_ms` are what their platform prefers.
    """

    groups: list[KVGroup]
    ledger: Ledger
    seconds: list[dict[str, float]]
    async_scheduling: bool
    step_target_ms: int
