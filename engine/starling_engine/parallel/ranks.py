"""The communicators of one rank, by what the ranks in each of them split."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from starling_engine import native
from starling_engine.config import WorkerConfig
from starling_engine.parallel.communicator import ALONE, Communicator
from starling_engine.parallel.gloo import GlooCommunicator, join_store
from starling_engine.parallel.nccl import join_nccl
from starling_engine.parallel.nearby import share_memory
from starling_engine.parallel.one_shot import join_one_shot
from starling_engine.parallel.shared import SharedCommunicator
from starling_engine.topology.rendezvous import Rendezvous
from starling_engine.topology.shard import Shard

logger = logging.getLogger("starling.parallel")


@dataclass(frozen=True, slots=True)
class RankCommunicators:
    """tensor: the ranks that split each matrix. pipeline: those that split the layers."""

    tensor: Communicator = ALONE
    pipeline: Communicator = ALONE


def join_ranks(config: WorkerConfig, tick: Callable[[], None], device: torch.device) -> RankCommunicators:
    """Meets the other ranks of the layout, each with a device of its own where `device` is a GPU; raises RankLost when one does not
    come. `tick` as in `GlooCommunicator`.
    """
    if config.layout.world_size == 1:
        return RankCommunicators()
    assert config.rendezvous is not None, "ranks need a place to meet"
    rendezvous, layout = config.rendezvous, config.layout
    place = layout.coordinates(config.rank)
    store = join_store(rendezvous)

    def join(name: str, index: int, count: int, *, sums: bool) -> Communicator:
        if count == 1:
            return ALONE
        name = f"{name}/{place.dp}"
        gloo = GlooCommunicator(store, name, Shard(index, count), rendezvous, tick)
        if device.type == "cuda":
            one_shot = join_one_shot(gloo, device) if sums else None
            return join_nccl(gloo, store, name, rendezvous, device, one_shot)
        return nearby(gloo, rendezvous) if sums else gloo

    return RankCommunicators(
        tensor=join(f"tensor/{place.pp}", place.tp, layout.tensor, sums=True),
        pipeline=join(f"pipeline/{place.tp}", place.pp, layout.pipeline, sums=False),
    )


def nearby(ranks: Communicator, rendezvous: Rendezvous, call: Callable[[int], str] | None = None) -> Communicator:
    """Through shared memory where that can be. `call` as in `SharedCommunicator`."""
    if ranks.shard.count == 1 or native.load() is None or not share_memory(ranks):
        return ranks
    logger.info("%d ranks exchange through shared memory (they are on one machine)", ranks.shard.count)
    return SharedCommunicator(ranks, rendezvous.timeout, call)
