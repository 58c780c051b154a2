"""Experts on the move: a rank loads what a new placement gives it while it serves, and changes over between two steps."""

import logging
import threading
import time
from collections.abc import Mapping

import torch

from starling_engine.errors import EpochFailed
from starling_engine.expert_parallel.expert_peers import FindPeers, PeerExperts
from starling_engine.expert_parallel.expert_ranks import ExpertRanks
from starling_engine.expert_parallel.expert_sources import CheckpointExperts, ExpertSource, FastestSource, SourceSpeeds
from starling_engine.layers.experts import Experts
from starling_engine.parallel.communicator import Communicator
from starling_engine.platforms.priority import lower_priority
from starling_engine.topology.epoch import ExpertLoads
from starling_engine.topology.placement import Placement
from starling_engine.weights.slot import WeightSource

logger = logging.getLogger("starling.parallel")


class ExpertLoading:
    """A thread that loads experts, layer by layer; `experts` as `Decoder.experts`, `missing` those to load of each layer.

    After each it rests `rest` times as long as that took.
    """

    def __init__(self, experts: Mapping[int, Experts], missing: Mapping[int, list[int]], source: ExpertSource, rest: float) -> None:
        self.layers = self.loaded = 0
        """Layers, and experts, that are loaded."""
        self.total = sum(map(len, missing.values()))
        self.error: Exception | None = None
        self._rest = rest
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(experts, missing, source), name="experts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Waits for the expert that is being loaded."""
        self._stopped.set()
        self._thread.join()

    def _run(self, experts: Mapping[int, Experts], missing: Mapping[int, list[int]], source: ExpertSource) -> None:
        lower_priority()
        try:
            with torch.inference_mode():
                for row, wanted in missing.items():
                    for expert in wanted:
                        if self._stopped.is_set():
                            return
                        began = time.monotonic()
                        source.fill(experts[row], row, expert, self._stopped.is_set)
                        self.loaded += 1
                        self._stopped.wait(self._rest * (time.monotonic() - began))
                    self.layers += 1
        except EpochFailed:
            assert self._stopped.is_set(), "nobody else cancels it"
        except Exception as error:  # noqa: BLE001 - it is raised where the result is asked for
            logger.error("experts could not be loaded: %s", error)
            self.error = error
        finally:
            source.close()


class Rearrangement:
    """One rank's way to another placement: `start`, and when `ready` has come to `num_layers` on all ranks, `commit` with the
    communicator of the new placement's ranks. Among the same ranks layers can be changed over one after another, by `flip_to`.

    All calls come between steps, from the thread that runs them; at which step to change over is for all ranks to agree on. Until
    then tokens go where they went, and after `cancel` nothing of what is not changed over is left.
    """

    def __init__(self, ranks: ExpertRanks, experts: Mapping[int, Experts], source: WeightSource) -> None:
        """`experts` as `Decoder.experts`."""
        self._ranks = ranks
        self._experts = experts
        self._source = source
        self.rows = tuple(sorted(experts))
        """The layers here that have experts."""
        self._placement: Placement | None = None
        self._loading: ExpertLoading | None = None
        self._fastest: FastestSource | None = None
        self._speeds = SourceSpeeds()
        """Within an epoch: a rearrangement may be of two experts."""
        self._flipped = 0

    @property
    def num_layers(self) -> int:
        """Of the layers here, those with experts."""
        return len(self.rows)

    @property
    def active(self) -> bool:
        return self._placement is not None

    @property
    def ready(self) -> int:
        """How many layers, from the first on, could be changed over. Raises what loading raised: a WeightError, or a ConfigError
        where there are too few slots for what the rank has and what it is to have.
        """
        if self._loading is None:
            return 0
        if self._loading.error is not None:
            raise self._loading.error
        return self._loading.layers

    @property
    def progress(self) -> tuple[int, int]:
        """(experts loaded, experts to load), of the last start."""
        return (0, 0) if self._loading is None else (self._loading.loaded, self._loading.total)

    @property
    def loaded(self) -> dict[str, ExpertLoads]:
        """What has come from each source, since the last start."""
        return self._fastest.loaded if self._fastest is not None else {}

    def start(self, placement: Placement, rank: int, rest: float = 0.0, find_peers: FindPeers | None = None) -> None:
        """Begins to load what the rank `rank` of `placement` holds and this one has not. `rest` as in `ExpertLoading`.

        From the checkpoint, or from the ranks that `find_peers` finds (called in the thread that loads), whichever is faster.
        """
        assert not self.active, "one at a time: commit or cancel comes first"
        held = placement.held(rank)
        missing = {row: [e for e in held[row] if e not in self._experts[row].taken] for row in self.rows}
        self._placement, self._flipped = placement, 0
        peers = [PeerExperts(find_peers)] if find_peers is not None else []
        self._fastest = FastestSource([CheckpointExperts(self._source), *peers], self._speeds)
        self._loading = ExpertLoading(self._experts, missing, self._fastest, rest)

    def flip_to(self, count: int) -> None:
        """The first `count` layers change over, of those here; the last of them ends the rearrangement."""
        assert self._placement is not None and self._flipped <= count <= self.ready
        for row in self.rows[self._flipped : count]:
            self._ranks.flip_layer(row, self._placement.layers[row])
            self._keep(row)
        self._flipped = count
        if count == self.num_layers:
            self._placement = None

    def commit(self, communicator: Communicator) -> None:
        """All layers change over. Raises ConfigError for ranks that the placement does not fit."""
        assert self.ready == self.num_layers
        self._finish(communicator)
        self._speeds = SourceSpeeds()

    def cancel(self) -> None:
        """Waits for the expert that is being loaded; does nothing when no rearrangement is under way."""
        if self._loading is not None:
            self._loading.stop()
        for row in self.rows:
            self._keep(row)
        self._placement = None

    def _finish(self, communicator: Communicator) -> None:
        assert self._placement is not None, "start comes first"
        self._ranks.flip(communicator, self._placement)
        for row in self.rows:
            self._keep(row)
        self._placement = None

    def _keep(self, row: int) -> None:
        """Frees the slots of experts that are not the rank's, by the placement in force."""
        experts, held = self._experts[row], self._ranks.held(row)
        for expert in experts.taken.difference(held):
            experts.drop(expert)
        assert all(experts.has(expert) for expert in held), "changed over before all was loaded"
