"""Sums over the GPUs of one machine by kernels in which each GPU reads the others' parts (`kernels.peer_sums`).

A ring passes each part on once for each rank, and each hop costs a few microseconds, whatever the size. Not run yet on two GPUs.
"""

import logging

import torch

from starling_engine.errors import ConfigError
from starling_engine.kernels.fused_rows import RowNorm
from starling_engine.kernels.rounded_rows import RoundedRows, RowRounding
from starling_engine.parallel.communicator import Communicator
from starling_engine.parallel.peer_memory import PeerMemory
from starling_engine.parallel.shared_memory import can_share_memory
from starling_engine.platforms.triton_support import why_not_triton

logger = logging.getLogger("starling.parallel")

MAX_BYTES = 8 << 20
"""NCCL sums more than that. On Hopper it took 76 us for 8 MiB and 121 for 16. Two shots of torch's took 65 and 125.

Both are of the last table for Hopper in vllm-project/vllm, pull request 42324.
"""

MAX_RANKS = 8
"""The kernels read one rank after another."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

ONE_SHOT, TWO_SHOTS = (5e-6, 330e9), (11e-6, 280e9)
"""Seconds of a sum beside its bytes, and bytes/s that a rank reads of others: fitted to vLLM's kernels of either kind.

On H100s they took 7 and 12 us for 0.5 MiB on two ranks, 10 and 17 on four, 13 and 15 on six. On six they took 70 and 37 us for
4 MiB (vllm-project/vllm, pull request 24111).
"""


def seconds(nbytes: int, ranks: int, *, shots: int) -> float:
    """Returns what a sum is expected to take. Each rank reads all parts of others in one shot, and two of `ranks` parts in two."""
    beside, rate = ONE_SHOT if shots == 1 else TWO_SHOTS
    return beside + nbytes * (ranks - 1) * (1 if shots == 1 else 2 / ranks) / rate


def one_shot_bytes(ranks: int) -> int:
    """Returns the largest sum for one shot. Where there are two shots too, they have the upper half of MAX_BYTES at least.

    So of steps whose tokens are powers of two some take the one, and some the other.
    """
    saved = seconds(MAX_BYTES, ranks, shots=1) - seconds(MAX_BYTES, ranks, shots=2)
    if saved <= 0:
        return MAX_BYTES
    slower = saved + TWO_SHOTS[0] - ONE_SHOT[0]  # by its bytes alone
    return min(MAX_BYTES // 2, int(MAX_BYTES * (TWO_SHOTS[0] - ONE_SHOT[0]) / slower))


class PeerSums:
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
        self._one_shot_bytes = one_shot_bytes(len(regions))

    def takes(self, x: torch.Tensor) -> bool:
        return x.dtype in DTYPES and x.is_contiguous() and 0 < x.nbytes <= MAX_BYTES

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums in place, and returns x."""
        from starling_engine.kernels.peer_sums import one_shot_sum, two_shot_sum

        (one_shot_sum if x.nbytes <= self._one_shot_bytes else two_shot_sum)(x, self._regions, self._rank)
        return x

    def takes_norm(self, x: torch.Tensor) -> bool:
        """Says whether there is `add_norm` of x [T, size]: of as many rows as a launch that sums has room for."""
        from starling_engine.kernels.peer_sums import most_norm_rows

        return self.takes(x) and x.nbytes <= self._one_shot_bytes and len(x) <= most_norm_rows(x.shape[1])

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: RowNorm, rounding: RowRounding | None
    ) -> torch.Tensor | RoundedRows:
        """Adds the sum of x [T, size] to the residual, in place, and returns its norm, rounded if asked for. Overwrites x."""
        from starling_engine.kernels.peer_sums import one_shot_sum_norm

        return one_shot_sum_norm(x, residual, norm.weight, norm.eps, self._regions, self._rank, rounding)


def join_peer_sums(host: Communicator, device: torch.device) -> PeerSums | None:
    """Joins the ranks of `host`. All get a result, or none does; logs which, and why."""
    memory, reason = _join(host, device)
    if memory is None:
        logger.info("%d ranks sum by NCCL alone: %s", host.shard.count, reason)
        return None
    logger.info("%d ranks sum up to %d MiB in one kernel: they reach each other's memory", host.shard.count, MAX_BYTES >> 20)
    return PeerSums(torch.tensor(memory.addresses, dtype=torch.int64, device=device), host.shard.index, memory)


def _join(host: Communicator, device: torch.device) -> tuple[PeerMemory | None, str]:
    """Makes the same exchanges on every rank, whatever fails, so that none waits for one that another leaves out."""
    if not can_share_memory(host):
        return None, "they are not on one machine"
    if host.shard.count > MAX_RANKS:
        return None, f"more than {MAX_RANKS}"
    if _any(host, why_not_triton(device) is not None):
        return None, "not all have triton"
    from starling_engine.kernels.peer_sums import region_bytes

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
