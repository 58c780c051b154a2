"""What ranks that share work ask of each other."""

from collections.abc import Callable, Sequence
from typing import ParamSpec, Protocol, TypeVar

import torch

from starling_engine.errors import PeerLost
from starling_engine.topology.shard import Shard

P = ParamSpec("P")
T = TypeVar("T")
Arriving = Callable[[], torch.Tensor]
"""Waits for what is under way, and gives it. Called once, before the next exchange of the same communicator."""


def of_group(call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """What a process group's `call` gives. It says that another rank is gone, at once or when waited for, by a RuntimeError: here
    that is PeerLost. A fault of this rank's own device is raised as it is.
    """
    try:
        return call(*args, **options)
    except torch.AcceleratorError:
        raise
    except RuntimeError as error:
        raise PeerLost(f"another rank is gone or stuck: {error}") from error


class Communicator(Protocol):
    """The ranks that split one thing among them; `shard` says which of them this one is.

    Every rank makes the same calls in the same order. A call raises RankLost when another rank is gone or does not come in time:
    PeerLost where it cannot tell which one.
    """

    shard: Shard

    @property
    def capturable(self) -> bool:
        """Whether `all_reduce` and `all_gather` may be recorded with a step: the host has no part in them."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in x's shape and dtype; x may be overwritten."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [...] of every rank -> [count, ...], in the order of the ranks."""
        ...

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> Arriving:
        """x [N, ...]: the first sent[0] rows go to rank 0, the next sent[1] to rank 1 -> [M, ...], received[r] rows of each rank r.

        All ranks give rows of the same shape and dtype; x must not be changed before all have arrived.
        """
        ...

    def send(self, x: torch.Tensor, to: int) -> None:
        """Returns at once; x must not be changed any more."""
        ...

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Fills x, of the shape and dtype that `source` sends next."""
        ...

    def tick(self) -> None:
        """Counts progress, before each wait for the others: of ranks that wait, the one that is missing has counted fewest."""
        ...


class SingleRank:
    """One rank: nothing to exchange."""

    shard = Shard()
    capturable = True

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x[None]

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> Arriving:
        assert list(sent) == list(received) == [len(x)]
        return lambda: x

    def send(self, x: torch.Tensor, to: int) -> None:
        raise AssertionError(f"{to} is no rank to send {tuple(x.shape)} to")

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        raise AssertionError(f"{source} is no rank to receive {tuple(x.shape)} from")

    def tick(self) -> None:
        """It never waits."""


ALONE = SingleRank()
