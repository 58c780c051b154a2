"""The exchanges that ranks which share work can make."""

from collections.abc import Callable, Sequence
from typing import ParamSpec, Protocol, TypeVar

import torch

from starling_engine.errors import PeerLost
from starling_engine.topology.shard import Shard

P = ParamSpec("P")
T = TypeVar("T")
PendingTensor = Callable[[], torch.Tensor]
"""Waits for a tensor that is on its way, and returns it. Called once, before the next exchange of the same communicator."""


def call_group(call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Calls a method of a process group, or waits for its work. Raises PeerLost where torch raises RuntimeError: a rank is gone.

    A fault of this rank's own device is raised as it is.
    """
    try:
        return call(*args, **options)
    except torch.AcceleratorError:
        raise
    except RuntimeError as error:
        raise PeerLost(f"another rank is gone or stuck: {error}") from error


def no_tick() -> None:
    """Does nothing, for callers whose progress nobody watches."""


class Communicator(Protocol):
    """Ranks that split one thing among them; `shard` says which of them this one is.

    Every rank makes the same calls in the same order. A call raises RankLost when another rank is gone or late, and its subclass
    PeerLost where it is not known which one.
    """

    shard: Shard

    @property
    def capturable(self) -> bool:
        """True where `all_reduce` and `all_gather` may be recorded with a step, since the host has no part in them."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums over the ranks, in x's shape and dtype. May overwrite x."""
        ...

    def part_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype in which ranks hand in their parts of a sum that is rounded to `dtype` afterwards.

        fp32 where an exchange costs time whatever its size; `dtype` itself where bytes and conversions cost more than they save.
        """
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Stacks x [...] of every rank -> [count, ...], in the order of the ranks."""
        ...

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> PendingTensor:
        """Sends rows of x [N, ...]: the first sent[0] to rank 0, the next sent[1] to rank 1, and so on.

        Returns [M, ...], with received[r] rows of each rank r, in the order of the ranks.

        All ranks give rows of the same shape and dtype. x must not change before the result has come.
        """
        ...

    def send(self, x: torch.Tensor, to: int) -> None:
        """Returns at once. x must not change any more."""
        ...

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Fills x, which has the shape and dtype that `source` sends next."""
        ...

    def tick(self) -> None:
        """Counts progress before each wait for other ranks: the rank that is missing has counted the fewest."""
        ...


class SingleRank:
    """A rank alone, with nothing to exchange."""

    shard = Shard()
    capturable = True

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def part_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x[None]

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> PendingTensor:
        assert list(sent) == list(received) == [len(x)]
        return lambda: x

    def send(self, x: torch.Tensor, to: int) -> None:
        raise AssertionError(f"{to} is no rank to send {tuple(x.shape)} to")

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        raise AssertionError(f"{source} is no rank to receive {tuple(x.shape)} from")

    def tick(self) -> None:
        """Does nothing: a rank alone never waits."""


ALONE = SingleRank()
