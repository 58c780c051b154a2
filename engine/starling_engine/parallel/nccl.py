"""Exchange between ranks with a GPU each: NCCL for tensors on the device, another communicator for the few on the host.

Not run yet on two GPUs: one GPU takes no second rank. Tests run its calls over gloo's process group, which has the same ones.
"""

import datetime
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store, Work

from starling_engine.errors import ConfigError, PeerLost
from starling_engine.kernels.fused_rows import RowNorm
from starling_engine.kernels.rounded_rows import RoundedRows, RowRounding
from starling_engine.parallel.communicator import Communicator, PendingTensor, call_group
from starling_engine.parallel.gloo import MAX_SENT
from starling_engine.parallel.peer_sums import PeerSums
from starling_engine.topology.rendezvous import Rendezvous


def join_nccl(
    host: Communicator,
    store: Store,
    name: str,
    rendezvous: Rendezvous,
    device: torch.device,
    peer_sums: PeerSums | None = None,
) -> "NcclCommunicator":
    """Joins the ranks of `host` by NCCL too, for tensors on `device`; `name` as in `GlooCommunicator`.

    Raises ConfigError where this torch has no NCCL, PeerLost where a rank does not come.
    """
    if not torch.distributed.is_nccl_available():
        raise ConfigError("several ranks on cuda need a torch that is built with NCCL; possible: cpu", "device")
    from torch._C._distributed_c10d import ProcessGroupNCCL

    nccl: Any = ProcessGroupNCCL  # its type stubs lack most of it
    options = nccl.Options()
    options._timeout = datetime.timedelta(seconds=rendezvous.timeout)
    try:
        group = nccl(PrefixStore(f"{name}/nccl", store), host.shard.index, host.shard.count, options)
        group.eager_connect_single_device(device)  # else the first sum would, while a step runs
    except (RuntimeError, ValueError) as error:
        raise PeerLost(f"the ranks of {name} did not all come: {error}") from error
    return NcclCommunicator(host, group, device, peer_sums)


class NcclCommunicator:
    """Queues exchanges of device tensors on the current stream, and returns before they are done.

    So a rank that is gone shows later, or not here at all: the supervisor, which counts the ranks' progress, finds it. Sums that
    are not large go to `peer_sums`, which the ranks of one machine may have.
    """

    capturable = True

    def __init__(self, host: Communicator, group: Any, device: torch.device, peer_sums: PeerSums | None = None) -> None:
        """`group` is a ProcessGroup of the same ranks in the same order."""
        self.shard = host.shard
        self._host = host
        self._group = group
        self._device = device
        self._peer_sums = peer_sums
        self._sent: deque[tuple[Work, torch.Tensor]] = deque()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if not self._has(x):
            return self._host.all_reduce(x)
        self.tick()
        if self._peer_sums is not None and self._peer_sums.takes(x):
            return self._peer_sums.all_reduce(x)
        x = x.contiguous()
        self._wait(call_group(self._group.allreduce, [x]))
        return x

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: RowNorm, rounding: RowRounding | None
    ) -> torch.Tensor | RoundedRows | None:
        if self._peer_sums is None or not self._has(x) or not self._peer_sums.takes_norm(x):
            return None
        self.tick()
        return self._peer_sums.add_norm(x, residual, norm, rounding)

    def part_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns `dtype`: products are rounded to it before they could be sent, and our kernels add in fp32."""
        return dtype

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        if not self._has(x):
            return self._host.all_gather(x)
        self.tick()
        out = x.new_empty((self.shard.count, *x.shape))
        self._wait(call_group(self._group._allgather_base, out.view(-1), x.contiguous().view(-1)))
        return out

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> PendingTensor:
        if not self._has(x):
            return self._host.all_to_all(x, sent, received)
        self.tick()
        x, out = x.contiguous(), x.new_empty((sum(received), *x.shape[1:]))
        work = call_group(self._group.alltoall_base, out, x, list(received), list(sent))

        def arrived() -> torch.Tensor:
            self._wait(work)
            return out

        return arrived

    def send(self, x: torch.Tensor, to: int) -> None:
        if not self._has(x):
            self._host.send(x, to)
            return
        while len(self._sent) >= MAX_SENT:
            self._wait(self._sent.popleft()[0])
        x = x.contiguous()
        self._sent.append((call_group(self._group.send, [x], to, 0), x))

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        if not self._has(x):
            return self._host.receive(x, source)
        self.tick()
        self._wait(call_group(self._group.recv, [x], source, 0))
        return x

    def tick(self) -> None:
        self._host.tick()

    def close(self) -> None:
        """Waits for the calls that are queued. No call may follow."""
        torch.cuda.synchronize(self._device)
        self._group.shutdown()

    def _has(self, x: torch.Tensor) -> bool:
        return x.device.type == self._device.type

    def _wait(self, work: Work) -> None:
        """Makes the device's stream wait for the work, not this thread."""
        call_group(work.wait)
