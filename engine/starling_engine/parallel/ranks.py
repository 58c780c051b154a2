"""Joins one rank to the others: a communicator for each thing that ranks split."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from starling_engine import native
from starling_engine.config import WorkerConfig
from starling_engine.parallel.communicator import ALONE, Communicator
from starling_engine.parallel.gloo import GlooCommunicator, join_store
from starling_engine.parallel.nccl import join_nccl
from starling_engine.parallel.peer_sums import join_peer_sums
from starling_engine.parallel.shared_memory import SharedMemoryCommunicator, can_share_memory
from starling_engine.topology.rendezvous import Rendezvous
from starling_engine.topology.shard import Shard

logger = logging.getLogger("starling.parallel")


@dataclass(frozen=True, slots=True)
class RankCommunicators:
    """`tensor` has the ranks that split each matrix, `pipeline` those that split the layers."""

    tensor: Communicator = ALONE
    pipeline: Communicator = ALONE


def join_ranks(config: WorkerConfig, tick: Callable[[], None], device: torch.device) -> RankCommunicators:
    """Meets the other ranks of the layout. Each has its own GPU, if `device` is one.

    Raises RankLost when one does not come. `tick` as in `Communicator`.
    """
    if config.layout.world_size == 1:
        return RankCommunicators()
    assert config.rendezvous is not None, "several ranks need a rendezvous"
    rendezvous, layout = config.rendezvous, config.layout
    at = layout.coordinates(config.rank)
    store = join_store(rendezvous)

    def join(name: str, index: int, count: int, *, sums: bool) -> Communicator:
        if count == 1:
            return ALONE
        name = f"{name}/{at.dp}"
        gloo = GlooCommunicator(store, name, Shard(index, count), rendezvous, tick)
        if device.type == "cuda":
            peer_sums = join_peer_sums(gloo, device) if sums else None
            return join_nccl(gloo, store, name, rendezvous, device, peer_sums)
        return with_shared_memory(gloo, rendezvous) if sums else gloo

    return RankCommunicators(
        tensor=join(f"tensor/{at.pp}", at.tp, layout.tensor, sums=True),
        pipeline=join(f"pipeline/{at.tp}", at.pp, layout.pipeline, sums=False),
    )


def with_shared_memory(ranks: Communicator, rendezvous: Rendezvous, name_of: Callable[[int], str] | None = None) -> Communicator:
    """Returns a communicator of the same ranks, through shared memory where they can share it.

    `name_of` as in `SharedMemoryCommunicator`.
    """
    if ranks.shard.count == 1 or native.load() is None or not can_share_memory(ranks):
        return ranks
    logger.info("%d ranks exchange through shared memory (they are on one machine)", ranks.shard.count)
    return SharedMemoryCommunicator(ranks, rendezvous.timeout, name_of)
