"""Messages in which a core tells frontends that follow it what it has cached: all at first, then what changes.

Hashes are those of KV events, without tokens. Blocks of the first KV group alone are told: a prefix is looked for by these.
Snapshots of a recurrent state are told as a medium of their own, each by the block at whose end it is.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

import msgspec

from starling_engine.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, Medium, event_hash

MOST_HASHES = 4096
"""Most hashes of a message, so that it holds nobody up for long."""
SNAPSHOTS = " snapshots"
"""End of the name of a medium that is of snapshots."""

FoundBy = Literal["blocks", "snapshots", "blocks and snapshots"]
"""A prefix is found by its blocks, by a snapshot at its end, or by both."""


class CacheChanges(msgspec.Struct, omit_defaults=True):
    """Blocks that a medium has now, and blocks that it no longer has. `anew`: nothing that was told before holds any more.

    `found_by` comes with `anew`. Who does not know a medium leaves it out.
    """

    medium: str = "GPU"
    stored: list[int] = []
    removed: list[int] = []
    anew: bool = False
    found_by: FoundBy = "blocks"


class CoreChanges(msgspec.Struct, omit_defaults=True):
    """Changes of one of several cores, by its number among those that are followed together."""

    changes: CacheChanges
    core: int = 0


class FollowedGroups(NamedTuple):
    """Groups of a model of which it is told what is cached. Behind all KV groups, of which there are so many, comes the state's."""

    num_groups: int
    has_state: bool

    @property
    def found_by(self) -> FoundBy:
        if self.has_state:
            return "blocks and snapshots" if self.num_groups else "snapshots"
        return "blocks"

    def medium(self, medium: Medium, group: int | None) -> str | None:
        """Returns the name of what a group has in a medium; None where it is not told."""
        if self.has_state and group == self.num_groups:
            return medium + SNAPSHOTS
        return None if group else medium


def cached_now(followed: FollowedGroups, there: Mapping[Medium, Iterable[tuple[int, bytes]]]) -> Iterator[CacheChanges]:
    """Yields all blocks that media have, by their groups and full hashes."""
    blocks = defaultdict[str, dict[int, bool]](dict)
    for medium, cached in there.items():
        for group, name in cached:
            if (place := followed.medium(medium, group)) is not None:
                blocks[place][event_hash(name)] = True
    return _messages(followed, True, blocks)


def changes_of(followed: FollowedGroups, events: Iterable[BlockStored | BlockRemoved | AllBlocksCleared]) -> Iterator[CacheChanges]:
    """Yields what events have changed in the end."""
    anew, there = False, defaultdict[str, dict[int, bool]](dict)
    for event in events:
        if isinstance(event, AllBlocksCleared):
            anew = True
            there.clear()
        elif (place := followed.medium(event.medium, event.group_idx)) is not None:
            there[place].update(dict.fromkeys(event.block_hashes, isinstance(event, BlockStored)))
    return _messages(followed, anew, there)


def _messages(followed: FollowedGroups, anew: bool, there: Mapping[str, Mapping[int, bool]]) -> Iterator[CacheChanges]:
    """`there` says of blocks whether the medium has them."""
    if anew:
        yield CacheChanges(anew=True, found_by=followed.found_by)
    for medium, blocks in there.items():
        hashes = [*blocks]
        for first in range(0, len(hashes), MOST_HASHES):
            part = hashes[first : first + MOST_HASHES]
            yield CacheChanges(medium, [block for block in part if blocks[block]], [block for block in part if not blocks[block]])
