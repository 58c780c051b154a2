"""What a worker says of itself. Imports no torch."""

from dataclasses import dataclass

from starling_engine.kv.spec import KVGroup
from starling_engine.ledger import Ledger


@dataclass(frozen=True)
class WorkerReport:
    """What a worker that is ready tells the core. `seconds` is how long each step of its life so far took.

    `async_scheduling` is what its platform prefers.
    """

    groups: list[KVGroup]
    ledger: Ledger
    seconds: dict[str, float]
    async_scheduling: bool
