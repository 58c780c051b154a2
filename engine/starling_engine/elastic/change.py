"""A change of a group's size: its stage, and the seconds of each stage."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from starling_engine.topology.epoch import ExpertLoads

Stage = Literal["waiting", "preparing", "committing", "releasing"]


@dataclass(slots=True)
class SizeChange:
    """A change to `target` cores; `on_stage` is called when a stage begins."""

    target: int
    on_stage: Callable[[Stage], None] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each stage that has ended."""
    loaded: dict[str, ExpertLoads] = field(default_factory=dict)
    """Experts that ranks loaded for it, by their source."""
    stage: Stage | None = None
    _since: float = 0.0

    def enter(self, stage: Stage) -> None:
        self.end_stage()
        self.stage, self._since = stage, time.monotonic()
        if self.on_stage is not None:
            self.on_stage(stage)

    def end_stage(self) -> None:
        if self.stage is not None:
            self.seconds[self.stage] = time.monotonic() - self._since
