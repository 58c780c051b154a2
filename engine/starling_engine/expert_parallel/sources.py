"""Sources that a rank loads experts from: the checkpoint, or other ranks (`peers.py`), whichever proves faster."""

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
"""Experts that come from each source before one is chosen. Later, a source's speed is that of its last PROBES experts."""


class ExpertSource(Protocol):
    """Loads experts into their slots. Used by one thread."""

    name: str

    def has(self, layer: int, expert: int, cancelled: Callable[[], bool]) -> bool:
        """Returns whether the source may have the expert."""
        ...

    def fill(self, experts: Experts, layer: int, expert: int, cancelled: Callable[[], bool]) -> None:
        """Loads an expert into the slot that `experts` has reserved for it, or into a free one.

        Raises WeightError where this source cannot, ConfigError where there is no slot, EpochFailed when it is cancelled.
        """
        ...

    def close(self) -> None: ...


class CheckpointSource:
    """An ExpertSource that reads the files, as the model's start does."""

    name = CHECKPOINT

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def has(self, _layer: int, _expert: int, _cancelled: Callable[[], bool]) -> bool:
        return True

    def fill(self, experts: Experts, _layer: int, expert: int, _cancelled: Callable[[], bool]) -> None:
        self._source.fill(experts.reserve(expert))

    def close(self) -> None:
        """Does nothing: files are open only while an expert is read."""


@dataclass(slots=True)
class SourceSpeeds:
    """Speeds of sources, by name: bytes a second for each of the last experts, 0 for one that did not come."""

    rates: defaultdict[str, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=PROBES)))
    preferred: str = ""

    def best(self, name: str) -> float:
        """Returns the best of the last speeds: one slow expert does not make a source slow."""
        return max(self.rates[name], default=0.0)

    def is_measured(self, name: str) -> bool:
        return len(self.rates[name]) == PROBES or 0.0 in self.rates[name]


class FastestSource:
    """An ExpertSource of several. The first experts come from each in turn, the others from the one that was faster lately.

    An expert that one source cannot load comes from another, which is preferred from then on.
    """

    name = "the fastest"

    def __init__(self, sources: Sequence[ExpertSource], speeds: SourceSpeeds | None = None) -> None:
        """`speeds`: what earlier loads measured."""
        self.loaded = {source.name: ExpertLoads() for source in sources}
        """Experts that came from each source, by its name."""
        self._sources = sources
        self._speeds = speeds or SourceSpeeds()

    def has(self, layer: int, expert: int, cancelled: Callable[[], bool]) -> bool:
        return any(source.has(layer, expert, cancelled) for source in self._sources)

    def fill(self, experts: Experts, layer: int, expert: int, cancelled: Callable[[], bool]) -> None:
        """Raises what the last source raised, when all of them fail."""
        able = [source for source in self._sources if source.has(layer, expert, cancelled)]
        order = sorted(able, key=lambda source: self._rank(source.name))
        self._log_choice(order)
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
        """Sorts sources: those that are not measured yet come first, then the fastest."""
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

    def _log_choice(self, order: list[ExpertSource]) -> None:
        speeds, chosen = self._speeds, order[0].name
        if len(order) < 2 or chosen == speeds.preferred or not speeds.is_measured(chosen):
            return
        speeds.preferred = chosen
        rates = ", ".join(f"{name} {speeds.best(name) / 1e6:.0f} MB/s" for name in speeds.rates)
        logger.info("experts come from %s (%s)", chosen, rates)
