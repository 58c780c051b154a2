"""One change of a group's size: where it stands, and what its stages took."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from starling_engine.topology.epoch import ExpertLoads

Stage = Literal["waiting", "preparing", "committing", "releasing"]
"""Where a change stands."""


@dataclass(slots=True)
class SizeChange:
    """One change of size: what it has come to, and how many seconds each of its stages took."""

    target: int
    tell: Callable[[Stage], None] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    loaded: dict[str, ExpertLoads] = field(default_factory=dict)
    """The experts that ranks loaded for it, by where they came from."""
    stage: Stage | None = None
    _since: float = 0.0

    def enter(self, stage: Stage) -> None:
        self.end_stage()
        self.stage, self._since = stage, time.monotonic()
        if self.tell is not None:
            self.tell(stage)

    def end_stage(self) -> None:
        if self.stage is not None:
            self.seconds[self.stage] = time.monotonic() - self._since
