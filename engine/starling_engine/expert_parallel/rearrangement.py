"""Moves experts: a rank loads what a new placement gives it while it serves, and changes over between two steps."""

import logging
import threading
import time
from collections.abc import Mapping

import torch

from starling_engine.errors import EpochFailed
from starling_engine.expert_parallel.peers import FindPeers
from starling_engine.expert_parallel.ranks import ExpertRanks
from starling_engine.expert_parallel.sources import CheckpointSource, ExpertSource, FastestSource, PeerSource, SourceSpeeds
from starling_engine.ipc.priority import lower_priority
from starling_engine.layers.experts import Experts
from starling_engine.parallel.communicator import Communicator
from starling_engine.topology.epoch import ExpertLoads
from starling_engine.topology.placement import Placement
from starling_engine.weights.weight_slot import WeightSource

logger = logging.getLogger("starling.parallel")


class ExpertLoader:
    """A thread that loads experts, layer by layer. After each it pauses `pause_ratio` times as long as the expert took."""

    def __init__(
        self, experts: Mapping[int, Experts], missing: Mapping[int, list[int]], source: ExpertSource, pause_ratio: float
    ) -> None:
        """`experts` as `Decoder.experts`; `missing` are the experts to load, by layer."""
        self.layers = self.loaded = 0
        """Layers, and experts, that are loaded."""
        self.total = sum(map(len, missing.values()))
        self.error: Exception | None = None
        self._pause_ratio = pause_ratio
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
                        self._stopped.wait(self._pause_ratio * (time.monotonic() - began))
                    self.layers += 1
        except EpochFailed:
            assert self._stopped.is_set(), "nothing else cancels it"
        except Exception as error:  # noqa: BLE001 - `Rearrangement.loaded_layers` raises it
            logger.error("experts could not be loaded: %s", error)
            self.error = error
        finally:
            source.close()


class Rearrangement:
    """Takes one rank to another placement: `start`, then `commit` or `commit_layers`, or `cancel`.

    To other ranks (a resize): when `loaded_layers` is `num_layers` on all of them, all `commit` at one step, with the communicator
    of the new placement's ranks. Among the same ranks (EPLB): layers that all have loaded change over together, by
    `commit_layers`.

    All calls come between steps, from the thread that runs them. The ranks have to agree on the step. Until then tokens go to
    experts by the old placement. After `cancel` the slots of experts that did not change over are free again.
    """

    def __init__(self, ranks: ExpertRanks, experts: Mapping[int, Experts], source: WeightSource) -> None:
        """`experts` as `Decoder.experts`."""
        self._ranks = ranks
        self._experts = experts
        self._source = source
        self.rows = tuple(sorted(experts))
        """The layers here that have experts, as `Placement` counts them."""
        self._placement: Placement | None = None
        self._loader: ExpertLoader | None = None
        self._fastest: FastestSource | None = None
        self._speeds = SourceSpeeds()
        """Kept within an epoch: a single rearrangement may be of two experts only."""
        self._committed = 0

    @property
    def num_layers(self) -> int:
        """Layers here that have experts."""
        return len(self.rows)

    @property
    def active(self) -> bool:
        return self._placement is not None

    @property
    def loaded_layers(self) -> int:
        """Layers, from the first on, that could change over.

        Raises what loading raised: a WeightError, or a ConfigError where the slots do not suffice for old and new experts.
        """
        if self._loader is None:
            return 0
        if self._loader.error is not None:
            raise self._loader.error
        return self._loader.layers

    @property
    def progress(self) -> tuple[int, int]:
        """(experts loaded, experts to load) since the last start."""
        return (0, 0) if self._loader is None else (self._loader.loaded, self._loader.total)

    @property
    def loaded(self) -> dict[str, ExpertLoads]:
        """Loads from each source since the last start."""
        return self._fastest.loaded if self._fastest is not None else {}

    def start(self, placement: Placement, rank: int, pause_ratio: float = 0.0, find_peers: FindPeers | None = None) -> None:
        """Begins to load the experts of rank `rank` of `placement` that are not here. `pause_ratio` as in `ExpertLoader`.

        They come from the checkpoint, or from the ranks that `find_peers` finds (called in the loader's thread).
        """
        assert not self.active, "one at a time: commit or cancel comes first"
        held = placement.held(rank)
        missing = {row: [e for e in held[row] if e not in self._experts[row].reserved] for row in self.rows}
        self._placement, self._committed = placement, 0
        peers = [PeerSource(find_peers)] if find_peers is not None else []
        self._fastest = FastestSource([CheckpointSource(self._source), *peers], self._speeds)
        self._loader = ExpertLoader(self._experts, missing, self._fastest, pause_ratio)

    def commit_layers(self, count: int) -> None:
        """Changes over the first `count` layers here, among the same ranks. The last layer ends the rearrangement."""
        assert self._placement is not None and self._committed <= count <= self.loaded_layers
        for row in self.rows[self._committed : count]:
            self._ranks.set_layer(row, self._placement.layers[row])
            self._drop_others(row)
        self._committed = count
        if count == self.num_layers:
            self._placement = None

    def commit(self, communicator: Communicator) -> None:
        """Changes over all layers. Raises ConfigError for ranks that the placement does not fit."""
        assert self._placement is not None, "start comes first"
        assert self.loaded_layers == self.num_layers
        self._ranks.set_placement(communicator, self._placement)
        for row in self.rows:
            self._drop_others(row)
        self._placement = None
        self._speeds = SourceSpeeds()

    def cancel(self) -> None:
        """Waits for the expert that is being loaded. Does nothing when no rearrangement is under way."""
        if self._loader is not None:
            self._loader.stop()
        for row in self.rows:
            self._drop_others(row)
        self._placement = None

    def _drop_others(self, row: int) -> None:
        """Frees the slots of experts that the placement in force does not give this rank."""
        experts, held = self._experts[row], self._ranks.held(row)
        for expert in experts.reserved.difference(held):
            experts.drop(expert)
        assert all(experts.has(expert) for expert in held), "changed over before all was loaded"
