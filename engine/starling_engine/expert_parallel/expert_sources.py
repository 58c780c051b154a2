"""Where a rank gets the experts that it is to hold: the checkpoint, or ranks that hold them; whichever proves faster."""

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from starling_engine.errors import WeightError
from starling_engine.layers.experts import Experts
from starling_engine.topology.epoch import CHECKPOINT, ExpertLoads
from starling_engine.weights.slot import WeightSource

logger = logging.getLogger("starling.parallel")

PROBES = 2
"""Experts that are taken from each source before one is chosen, and over which its speed is measured from then on."""


class ExpertSource(Protocol):
    """Where experts come from. Used by one thread."""

    name: str

    def has(self, layer: int, expert: int, cancelled: Callable[[], bool]) -> bool:
        """Whether it is worth asking."""
        ...

    def fill(self, experts: Experts, layer: int, expert: int, cancelled: Callable[[], bool]) -> None:
        """Loads an expert into a slot of its own, one that `experts` keeps for it already or another.

        Raises WeightError where this source cannot, ConfigError where there is no slot, EpochFailed when it is cancelled.
        """
        ...

    def close(self) -> None: ...


class CheckpointExperts:
    """An ExpertSource: what loads the model at its start, too."""

    name = CHECKPOINT

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def has(self, _layer: int, _expert: int, _cancelled: Callable[[], bool]) -> bool:
        return True

    def fill(self, experts: Experts, _layer: int, expert: int, _cancelled: Callable[[], bool]) -> None:
        self._source.fill(experts.take(expert))

    def close(self) -> None:
        """Files are opened for each expert."""


@dataclass(slots=True)
class SourceSpeeds:
    """How fast sources have been, by name: bytes a second of the last experts, 0 for one that did not come."""

    rates: defaultdict[str, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=PROBES)))
    preferred: str = ""

    def best(self, name: str) -> float:
        """A single slow expert does not make a source slow."""
        return max(self.rates[name], default=0.0)

    def is_measured(self, name: str) -> bool:
        return len(self.rates[name]) == PROBES or 0.0 in self.rates[name]


class FastestSource:
    """An ExpertSource of several. The first experts come from each in turn, the others from the one that was faster of late.

    What one cannot load comes from another, and that one is preferred from then on.
    """

    name = "the fastest"

    def __init__(self, sources: Sequence[ExpertSource], speeds: SourceSpeeds | None = None) -> None:
        """`speeds` of those that were used before it."""
        self.loaded = {source.name: ExpertLoads() for source in sources}
        """By the source's name."""
        self._sources = sources
        self._speeds = speeds or SourceSpeeds()

    def has(self, layer: int, expert: int, cancelled: Callable[[], bool]) -> bool:
        return any(source.has(layer, expert, cancelled) for source in self._sources)

    def fill(self, experts: Experts, layer: int, expert: int, cancelled: Callable[[], bool]) -> None:
        """Raises as the last source that it tried."""
        able = [source for source in self._sources if source.has(layer, expert, cancelled)]
        order = sorted(able, key=lambda source: self._rank(source.name))
        self._tell_choice(order)
        for source in order[:-1]:
            try:
                return self._measure(source, experts, layer, expert, cancelled)
            except WeightError as error:
                logger.warning("expert %d of layer %d does not come from %s: %s", expert, layer, source.name, error)
        return self._measure(order[-1], experts, layer, expert, cancelled)

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def _rank(self, name: str) -> tuple[int, float]:
        """Those that are to be measured come first."""
        if self._speeds.is_measured(name):
            return PROBES, -self._speeds.best(name)
        return len(self._speeds.rates[name]), 0.0

    def _measure(self, source: ExpertSource, experts: Experts, layer: int, expert: int, cancelled: Callable[[], bool]) -> None:
        began = time.monotonic()
        try:
            source.fill(experts, layer, expert, cancelled)
        except WeightError:
            self._speeds.rates[source.name].clear()
            self._speeds.rates[source.name].append(0.0)
            raise
        got = ExpertLoads(1, experts.bytes_each, time.monotonic() - began)
        self.loaded[source.name].add(got)
        self._speeds.rates[source.name].append(got.rate)

    def _tell_choice(self, order: list[ExpertSource]) -> None:
        speeds, chosen = self._speeds, order[0].name
        if len(order) < 2 or chosen == speeds.preferred or not speeds.is_measured(chosen):
            return
        speeds.preferred = chosen
        rates = ", ".join(f"{name} {speeds.best(name) / 1e6:.0f} MB/s" for name in speeds.rates)
        logger.info("experts come from %s (%s)", chosen, rates)
