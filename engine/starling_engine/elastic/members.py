"""The cores of a group, as whoever leads it sees them."""

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
        """The port of its store."""
        assert self.client.hello is not None, "only cores that have loaded are members"
        return self.client.hello.store


class CorePool(Protocol):
    """Where cores come from and go to."""

    async def launch(self, ranks: Sequence[int]) -> list[tuple[CoreClient, str]]:
        """The cores that are to have these data parallel ranks, once all have loaded, and their nodes' addresses.

        Raises what ended the loading of one, and then starts none.
        """
        ...

    async def release(self, clients: Sequence[CoreClient]) -> None:
        """They are in no epoch any more."""
        ...
