"""Small sums over the GPUs of one machine, in one kernel: each GPU reads every other's part (`kernels.one_shot`).

A ring passes each part on once for each rank, and each hop costs a few microseconds, whatever the size. Not run yet on two GPUs.
"""

import logging

import torch

from starling_engine.errors import ConfigError
from starling_engine.parallel.communicator import Communicator
from starling_engine.parallel.peer_memory import PeerMemory
from starling_engine.parallel.shared_memory import can_share_memory
from starling_engine.platforms.triton_support import why_not_triton

logger = logging.getLogger("starling.parallel")

MAX_BYTES = 512 << 10
"""A ring is faster for larger sums: the bytes that each rank reads here grow with the ranks, a ring's do not."""

MAX_RANKS = 8
"""The kernel reads one rank after another."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class OneShotAllReduce:
    """Sums in the order of the ranks, in fp32, so that all get the same result to the last bit. Can be captured.

    When a rank is gone, the others' kernels wait for ever; the supervisor, which counts the ranks' progress, ends them.
    """

    def __init__(self, regions: torch.Tensor, rank: int, memory: PeerMemory | None = None) -> None:
        """`regions` [ranks] int64 on the device: the address of each rank's region of `region_bytes(ranks)` bytes, zero at first.

        `memory`, to which the regions belong, lives as long as this object.
        """
        self._regions = regions
        self._rank = rank
        self._memory = memory

    def takes(self, x: torch.Tensor) -> bool:
        return x.dtype in DTYPES and x.is_contiguous() and 0 < x.nbytes <= MAX_BYTES

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums in place, and returns x."""
        from starling_engine.kernels.one_shot import one_shot_sum

        one_shot_sum(x, self._regions, self._rank)
        return x


def join_one_shot(host: Communicator, device: torch.device) -> OneShotAllReduce | None:
    """Joins the ranks of `host`. All get a result, or none does; logs which, and why."""
    memory, reason = _join(host, device)
    if memory is None:
        logger.info("%d ranks sum by NCCL alone: %s", host.shard.count, reason)
        return None
    logger.info("%d ranks sum up to %d KiB in one kernel: they reach each other's memory", host.shard.count, MAX_BYTES >> 10)
    return OneShotAllReduce(torch.tensor(memory.addresses, dtype=torch.int64, device=device), host.shard.index, memory)


def _join(host: Communicator, device: torch.device) -> tuple[PeerMemory | None, str]:
    """Makes the same exchanges on every rank, whatever fails, so that none waits for one that another leaves out."""
    if not can_share_memory(host):
        return None, "they are not on one machine"
    if host.shard.count > MAX_RANKS:
        return None, f"more than {MAX_RANKS}"
    if _any(host, why_not_triton(device) is not None):
        return None, "not all have triton"
    from starling_engine.kernels.one_shot import region_bytes

    memory, reason = None, ""
    try:
        memory = PeerMemory(region_bytes(host.shard.count))
    except ConfigError as error:
        reason = str(error)
    handle = memory.handle if memory is not None else bytes(PeerMemory.HANDLE_BYTES)
    handles = [bytes(row.tolist()) for row in host.all_gather(torch.frombuffer(bytearray(handle), dtype=torch.uint8))]
    try:
        if memory is not None:
            memory.open(handles, host.shard.index)
    except ConfigError as error:
        memory, reason = None, str(error)
    if _any(host, memory is None):
        return None, reason or "another rank cannot reach its peers' memory"
    return memory, ""


def _any(host: Communicator, mine: bool) -> bool:
    return bool(host.all_gather(torch.tensor([mine], dtype=torch.uint8)).any())
