"""EPLB at work: ranks count what their experts have to do, and now and then move them so that all have equally much to do."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from starling_engine.config import WorkerConfig
from starling_engine.expert_parallel.eplb_search import FoundPlacement, PlacementSearch, find
from starling_engine.expert_parallel.expert_peers import ExpertPeer
from starling_engine.expert_parallel.expert_ranks import ExpertRanks
from starling_engine.expert_parallel.rearrangement import Rearrangement
from starling_engine.model_config.moe import MoeConfig
from starling_engine.topology.epoch import Balance, EpochPlan, Rearranged
from starling_engine.topology.placement import Layer, Placement, even_slots, moves

logger = logging.getLogger("starling.worker")

OBJECTS = -1
AT_ONCE = 8
"""Layers that change over between two steps: with all of a large model's the step would be late."""
REST = 4.0
"""After each expert that is loaded, in times of how long that took: loading holds the interpreter, which steps wait for."""


@dataclass(slots=True)
class Moving:
    """A rearrangement under way. `found` is known to the first rank only."""

    before: Placement
    found: FoundPlacement | None
    since: float
    flipped: int = 0
    held_up: float = 0.0
    """Seconds, of the step that began the latest for it."""


class Balancing:
    """One rank's part among those that share a stage's experts.

    Before each step all hear what each has to say (`Lockstep.turn`), so that all do the same at the same step: send their counts to
    the first rank, take the placement that it has found, change over the layers that all have loaded. A rank that is to get ready
    for another epoch objects, or one that cannot load: then nothing begins, and what is under way stops where it is.
    Without `config.eplb` nothing ever begins.
    """

    def __init__(
        self,
        config: WorkerConfig,
        moe: MoeConfig,
        ranks: ExpertRanks,
        rearrangement: Rearrangement,
        tell: Callable[[Balance | Rearranged], None],
    ) -> None:
        """The first rank tells what came of it."""
        self._config = config
        self._moe = moe
        self._ranks = ranks
        self._rearrangement = rearrangement
        self._tell = tell
        self._stage = config.layout.coordinates(config.rank).pp
        self._epoch = self._nodes = 0
        self._addresses: Sequence[str] = ()
        self._search: PlacementSearch | None = None
        self._offer: FoundPlacement | None = None
        self._moving: Moving | None = None
        self._paused = False
        self._gave_up = False
        """What was under way, of which the others have not heard yet."""

    # ---- epochs ----

    def pause(self) -> None:
        """Another epoch is being prepared, with the same slots."""
        self._give_up()
        self._paused = True

    def resume(self) -> bool:
        """It was abandoned. False where none was being prepared."""
        paused, self._paused = self._paused, False
        return paused

    def begin(self, plan: EpochPlan, addresses: Sequence[str]) -> None:
        """An epoch that all its ranks are in from here on; `addresses` of their ExpertServers."""
        self._epoch, self._nodes, self._addresses = plan.number, plan.nodes, addresses
        self._search = self._offer = self._moving = None
        self._paused = self._gave_up = False
        if self._ranks.window is not None:
            self._ranks.window.clear()

    # ---- steps ----

    def says(self) -> tuple[int, int]:
        """(layers that are loaded, or OBJECTS; whether there is a placement to hand out)."""
        if self._paused or self._gave_up:
            return OBJECTS, 0
        if self._moving is None:
            return 0, int(self._has_offer())
        try:
            return self._rearrangement.ready, 0
        except Exception as error:  # noqa: BLE001 - whatever it is, experts are still where they were
            logger.warning("experts stay where they are: %s", error)
            self._give_up()
            return OBJECTS, 0

    def hear(self, step: int, said: torch.Tensor) -> None:
        """said [ranks, 2]: what each says before step number `step` of the epoch. Raises RankLost."""
        ready, offered = int(said[:, 0].min()), bool(said[:, 1].any())
        eplb = self._config.eplb
        if ready == OBJECTS:
            self._stop()
        elif self._moving is not None:
            self._flip_to(self._moving, min(ready, self._moving.flipped + AT_ONCE))
        elif offered:
            self._take(self._hand_out())
        elif eplb is not None and step % eplb.interval == 0 and self._can_move:
            self._look()

    def _look(self) -> None:
        """The first rank gets the counts of all, and thinks about them while steps go on."""
        counts, placement, window, rows = self._collect_counts(), self._ranks.placement, self._ranks.window, self._rows
        assert placement is not None and window is not None
        if counts is not None and counts.any() and self._search is None:
            slots, nodes, groups = self._slots, self._nodes, self._moe.routing.num_groups
            self._search = PlacementSearch(lambda: find(counts, placement, rows, slots, nodes, groups))

    def _has_offer(self) -> bool:
        if self._search is not None and self._search.done:
            found, self._search = self._search.found, None
            if found is not None:
                self._tell(Balance(self._stage, found.before))
                self._offer = found if found.placement != self._ranks.placement else None
        return self._offer is not None

    def _take(self, placement: Placement) -> None:
        assert self._ranks.placement is not None
        moving = self._moving = Moving(self._ranks.placement, self._offer, time.monotonic())
        self._offer = None
        peers = [ExpertPeer(address, dict(enumerate(moving.before.held(rank)))) for rank, address in enumerate(self._addresses)]
        self._rearrangement.start(placement, self._ranks.rank, REST, lambda _: peers)
        moving.held_up = time.monotonic() - moving.since

    def _flip_to(self, moving: Moving, count: int) -> None:
        if count > moving.flipped:
            began = time.monotonic()
            self._rearrangement.flip_to(count)
            moving.flipped = count
            moving.held_up = max(moving.held_up, time.monotonic() - began)
        if count == self._rearrangement.num_layers:
            self._end(moving, complete=True)

    def _give_up(self) -> None:
        if self._moving is not None and not self._gave_up:
            self._rearrangement.cancel()
        self._gave_up = True

    def _stop(self) -> None:
        """All do so at this step: layers that have changed over have done so on every rank."""
        self._give_up()
        self._gave_up = False
        if self._moving is not None:
            self._end(self._moving, complete=False)

    def _end(self, moving: Moving, *, complete: bool) -> None:
        self._moving, now = None, self._ranks.placement
        assert now is not None
        if moving.found is None:
            return
        moved = sum(len(experts) for rank in range(now.ranks) for experts in moves(moving.before, now, rank))
        seconds = time.monotonic() - moving.since
        logger.info(
            "%d experts moved in %.2f s, no step held up longer than %.1f ms: balance %.2f, then %.2f expected%s",
            *(moved, seconds, 1000 * moving.held_up, moving.found.before, moving.found.after),
            "" if complete else "; given up before all had",
        )
        layers = {row: now.layers[row] for row in self._rows}
        told = (self._epoch, self._stage, layers, moved, seconds, moving.found.before, moving.found.after, complete)
        self._tell(Rearranged(*told))

    # ---- between ranks ----

    @property
    def _rows(self) -> tuple[int, ...]:
        return self._rearrangement.rows

    @property
    def _can_move(self) -> bool:
        return bool(self._rows) and self._ranks.communicator.shard.count > 1

    @property
    def _slots(self) -> int:
        """Of each rank, for a layer, where all have as many."""
        assert self._config.eplb is not None
        even = even_slots(self._moe.num_experts, self._ranks.communicator.shard.count, self._config.eplb.redundant)
        return min(even, self._config.expert_slots)

    def _collect_counts(self) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]] | None:
        """[ranks, rows, experts] on the first rank."""
        assert self._ranks.window is not None
        ranks, size = self._ranks.communicator, len(self._rows)
        mine = self._ranks.window.loads()[list(self._rows)]
        sent = [size] + [0] * (ranks.shard.count - 1)
        received = [size if ranks.shard.first else 0] * ranks.shard.count
        counts = ranks.all_to_all(mine, sent, received)()
        return counts.view(ranks.shard.count, *mine.shape).numpy() if ranks.shard.first else None

    def _hand_out(self) -> Placement:
        """The first rank's placement, on all."""
        now, ranks = self._ranks.placement, self._ranks.communicator
        assert now is not None
        count, lines = ranks.shard.count, len(self._rows) * now.ranks
        table = torch.full((lines if self._offer else 0, self._slots), -1)
        if self._offer is not None:
            held = (experts for row in self._rows for experts in self._offer.placement.layers[row])
            for line, experts in enumerate(held):
                table[line, : len(experts)] = torch.tensor(experts)
        sent = [len(table)] * count
        received = [lines] + [0] * (count - 1)
        got = ranks.all_to_all(table.repeat(count, 1), sent, received)()
        new = dict(zip(self._rows, map(_layer, got.view(len(self._rows), now.ranks, -1).tolist()), strict=True))
        return Placement(now.num_experts, tuple(new.get(row, layer) for row, layer in enumerate(now.layers)))


def _layer(lines: list[list[int]]) -> Layer:
    return tuple(tuple(expert for expert in line if expert >= 0) for line in lines)
