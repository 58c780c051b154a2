"""EPLB while a rank serves: counts become a new placement now and then, and all ranks change over to it at the same steps."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from starling_engine.config import WorkerConfig
from starling_engine.expert_parallel.dp_sync import VETO, EplbVote
from starling_engine.expert_parallel.eplb_search import FoundPlacement, PlacementSearch, find_placement
from starling_engine.expert_parallel.peers import ExpertPeer
from starling_engine.expert_parallel.ranks import ExpertRanks
from starling_engine.expert_parallel.rearrangement import Rearrangement
from starling_engine.model_config.moe import MoeConfig
from starling_engine.topology.epoch import Balance, EpochPlan, Rearranged
from starling_engine.topology.placement import Layer, Placement, even_slots, moves

logger = logging.getLogger("starling.worker")

LAYERS_A_STEP = 8
"""Layers that change over between two steps. All layers of a large model would make the step late."""
LOAD_PAUSE = 4.0
"""Pause after each expert, as a multiple of its loading time: loading takes the interpreter, which steps need."""


@dataclass(slots=True)
class ActiveRearrangement:
    """A rearrangement under way. `found` is known to the first rank only."""

    before: Placement
    found: FoundPlacement | None
    since: float
    layers: int = 0
    """Layers that have changed over."""
    longest_pause: float = 0.0
    """Seconds, of the step that was held up the longest."""


class EplbManager:
    """One rank's part in EPLB, among the ranks that share a stage's experts.

    Before each step all ranks see each other's `EplbVote` (`DpSync.sync`), so all do the same before the same step. Every
    `interval` steps they send their counts to the first rank, which searches a placement in a thread. When it has one, it
    broadcasts it, and all load experts. Layers that all have loaded change over.

    A rank votes VETO when it prepares another epoch, or when it cannot load. Then nothing begins, and a rearrangement that is under
    way ends: layers that have changed over stay so. Without `config.eplb` nothing ever begins.
    """

    def __init__(
        self,
        config: WorkerConfig,
        moe: MoeConfig,
        ranks: ExpertRanks,
        rearrangement: Rearrangement,
        publish: Callable[[Balance | Rearranged], None],
    ) -> None:
        """`publish` is called by the first rank, with each balance that it counted and each rearrangement that ended."""
        self._config = config
        self._moe = moe
        self._ranks = ranks
        self._rearrangement = rearrangement
        self._publish = publish
        self._stage = config.layout.coordinates(config.rank).pp
        self._epoch = self._nodes = 0
        self._server_addresses: Sequence[str] = ()
        self._search: PlacementSearch | None = None
        self._found: FoundPlacement | None = None
        """A placement to broadcast."""
        self._active: ActiveRearrangement | None = None
        self._paused = False
        self._cancelled = False
        """True from the rank's own cancel until all ranks have seen its veto."""

    # ---- epochs ----

    def pause(self) -> None:
        """Stops EPLB while another epoch is prepared: that needs the same slots."""
        self._cancel()
        self._paused = True

    def resume(self) -> bool:
        """Goes on after that preparation was abandoned. Returns False where there was none."""
        paused, self._paused = self._paused, False
        return paused

    def begin_epoch(self, epoch_plan: EpochPlan, server_addresses: Sequence[str]) -> None:
        """Starts again in an epoch that all its ranks have entered; `server_addresses` of their ExpertServers."""
        self._epoch, self._nodes, self._server_addresses = epoch_plan.number, epoch_plan.nodes, server_addresses
        self._search = self._found = self._active = None
        self._paused = self._cancelled = False
        if self._ranks.window is not None:
            self._ranks.window.clear()

    # ---- before each step ----

    def vote(self) -> EplbVote:
        """Returns this rank's vote for the next sync."""
        if self._paused or self._cancelled:
            return EplbVote(VETO)
        if self._active is None:
            return EplbVote(has_placement=int(self._poll_search()))
        try:
            return EplbVote(self._rearrangement.loaded_layers)
        except Exception as error:  # noqa: BLE001 - whatever it is, experts are still where they were
            logger.warning("experts stay where they are: %s", error)
            self._cancel()
            return EplbVote(VETO)

    def act(self, step: int, votes: torch.Tensor) -> None:
        """votes [ranks, 2] before step number `step` of the epoch. Raises RankLost."""
        loaded, has_placement = int(votes[:, 0].min()), bool(votes[:, 1].any())
        eplb = self._config.eplb
        if loaded == VETO:
            self._stop()
        elif self._active is not None:
            self._commit_layers(self._active, min(loaded, self._active.layers + LAYERS_A_STEP))
        elif has_placement:
            placement = self._found.placement if self._found is not None else None
            self._start(_broadcast_placement(self._ranks, self._rows, self._slots, placement))
        elif eplb is not None and step % eplb.interval == 0 and self._can_move:
            self._start_search()

    def _start_search(self) -> None:
        """Gathers the counts at the first rank, which then searches while steps go on."""
        counts, placement, rows = _gather_counts(self._ranks, self._rows), self._ranks.placement, self._rows
        assert placement is not None
        if counts is not None and counts.any() and self._search is None:
            slots, nodes, groups = self._slots, self._nodes, self._moe.routing.num_groups
            self._search = PlacementSearch(lambda: find_placement(counts, placement, rows, slots, nodes, groups))

    def _poll_search(self) -> bool:
        """Returns whether there is a placement to broadcast. Publishes the balance when a search has ended."""
        if self._search is not None and self._search.done:
            found, self._search = self._search.found, None
            if found is not None:
                self._publish(Balance(self._stage, found.before))
                self._found = found if found.placement != self._ranks.placement else None
        return self._found is not None

    def _start(self, placement: Placement) -> None:
        before = self._ranks.placement
        assert before is not None
        active = self._active = ActiveRearrangement(before, self._found, time.monotonic())
        self._found = None
        peers = [ExpertPeer(address, dict(enumerate(before.held(rank)))) for rank, address in enumerate(self._server_addresses)]
        self._rearrangement.start(placement, self._ranks.rank, LOAD_PAUSE, lambda _: peers)
        active.longest_pause = time.monotonic() - active.since

    def _commit_layers(self, active: ActiveRearrangement, count: int) -> None:
        if count > active.layers:
            began = time.monotonic()
            self._rearrangement.commit_layers(count)
            active.layers = count
            active.longest_pause = max(active.longest_pause, time.monotonic() - began)
        if count == self._rearrangement.num_layers:
            self._end(active, complete=True)

    def _cancel(self) -> None:
        if self._active is not None and not self._cancelled:
            self._rearrangement.cancel()
        self._cancelled = True

    def _stop(self) -> None:
        """Ends what is under way, on all ranks at this step: the same layers have changed over on each."""
        self._cancel()
        self._cancelled = False
        if self._active is not None:
            self._end(self._active, complete=False)

    def _end(self, active: ActiveRearrangement, *, complete: bool) -> None:
        """The first rank logs and publishes the result."""
        self._active, now, found = None, self._ranks.placement, active.found
        assert now is not None
        if found is None:
            return
        moved = sum(len(experts) for rank in range(now.ranks) for experts in moves(active.before, now, rank))
        seconds = time.monotonic() - active.since
        logger.info(
            "%d experts moved in %.2f s, no step held up longer than %.1f ms: balance %.2f, then %.2f expected%s",
            moved,
            seconds,
            1000 * active.longest_pause,
            found.before,
            found.after,
            "" if complete else "; given up before all had",
        )
        layers = {row: now.layers[row] for row in self._rows}
        self._publish(Rearranged(self._epoch, self._stage, layers, moved, seconds, found.before, found.after, complete))

    @property
    def _rows(self) -> tuple[int, ...]:
        return self._rearrangement.rows

    @property
    def _can_move(self) -> bool:
        return bool(self._rows) and self._ranks.communicator.shard.count > 1

    @property
    def _slots(self) -> int:
        """Slots of each rank for a layer's experts; the same number on all ranks."""
        assert self._config.eplb is not None
        even = even_slots(self._moe.num_experts, self._ranks.communicator.shard.count, self._config.eplb.redundant)
        return min(even, self._config.expert_slots)


def _gather_counts(ranks: ExpertRanks, rows: Sequence[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]] | None:
    """Returns the counts of all ranks, [ranks, rows, experts], on the first rank."""
    assert ranks.window is not None
    communicator, size = ranks.communicator, len(rows)
    first, count = communicator.shard.first, communicator.shard.count
    mine = ranks.window.loads()[list(rows)]
    sent = [size] + [0] * (count - 1)
    received = [size if first else 0] * count
    counts = communicator.all_to_all(mine, sent, received)()
    return counts.view(count, *mine.shape).numpy() if first else None


def _broadcast_placement(ranks: ExpertRanks, rows: Sequence[int], slots: int, placement: Placement | None) -> Placement:
    """Returns the first rank's new `placement` on all ranks; the others give None.

    Each expert list of a rank and layer is a line of `slots` numbers, -1 where a slot stays empty.
    """
    now, communicator = ranks.placement, ranks.communicator
    assert now is not None
    count, lines = communicator.shard.count, len(rows) * now.ranks
    table = torch.full((lines if placement is not None else 0, slots), -1)
    if placement is not None:
        held = (experts for row in rows for experts in placement.layers[row])
        for line, experts in enumerate(held):
            table[line, : len(experts)] = torch.tensor(experts)
    sent = [len(table)] * count
    received = [lines] + [0] * (count - 1)
    got = communicator.all_to_all(table.repeat(count, 1), sent, received)()
    new = dict(zip(rows, map(_layer, got.view(len(rows), now.ranks, -1).tolist()), strict=True))
    return Placement(now.num_experts, tuple(new.get(row, layer) for row, layer in enumerate(now.layers)))


def _layer(lines: list[list[int]]) -> Layer:
    return tuple(tuple(expert for expert in line if expert >= 0) for line in lines)
