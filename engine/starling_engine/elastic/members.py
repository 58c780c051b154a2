"""The cores of a group, as its coordinator knows them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from starling_engine.core.client import CoreClient


@dataclass(frozen=True, slots=True)
class CoreMember:
    """A core of the group, with an id that never changes, and the address of its node."""

    id: int
    client: CoreClient
    host: str

    @property
    def store(self) -> int:
        """Port of the store that its rank 0 serves."""
        assert self.client.hello is not None, "only cores that have loaded are members"
        return self.client.hello.store


class CorePool(Protocol):
    """Starts cores, and ends them."""

    async def launch(self, ranks: Sequence[int]) -> list[tuple[CoreClient, str]]:
        """Starts cores for these data parallel ranks; returns them when all have loaded, with their nodes' addresses.

        Raises the error that ended the loading of one, and then starts none.
        """
        ...

    async def release(self, clients: Sequence[CoreClient]) -> None:
        """Takes cores back, which are in no epoch any more."""
        ...
