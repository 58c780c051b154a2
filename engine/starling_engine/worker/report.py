"""Reports of workers to their core. Imports no torch."""

from dataclasses import dataclass

from starling_engine.kv.spec import KVGroup
from starling_engine.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Phase:
    """Present activity of a worker that is not ready; `done` of `total` bytes, where that is known."""

    name: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class WorkerReport:
    """Report of workers that are ready. `seconds` has, by rank, the time of each step of its start.

    `async_scheduling` and `step_target_ms` are their platform's preferences. `store_port` is the port at which rank 0 serves the
    store in which ranks find each other; 0 where there is none.
    """

    groups: list[KVGroup]
    ledger: Ledger
    seconds: list[dict[str, float]]
    async_scheduling: bool
    step_target_ms: int
    store_port: int = 0
