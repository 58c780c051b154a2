"""Messages in which a core tells frontends that follow it what it has cached: all at first, then what changes.

Hashes are those of KV events, without tokens. Blocks of the first KV group alone are told: a prefix is looked for by these.
"""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from starling_engine.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, Medium, event_hash

MOST_HASHES = 4096
"""Most hashes of a message, so that it holds nobody up for long."""


class CacheChanges(msgspec.Struct, omit_defaults=True):
    """Blocks that a medium has now, and blocks that it no longer has. `anew`: nothing that was told before holds any more.

    Who does not know a medium leaves it out.
    """

    medium: str = "GPU"
    stored: list[int] = []
    removed: list[int] = []
    anew: bool = False


class CoreChanges(msgspec.Struct, omit_defaults=True):
    """Changes of one of several cores, by its number among those that are followed together."""

    changes: CacheChanges
    core: int = 0


def cached_now(device: Iterable[bytes], host: Iterable[bytes]) -> Iterator[CacheChanges]:
    """Yields all blocks that the device and the CPU tier have, by their full hashes."""
    media: dict[Medium, Iterable[bytes]] = {"GPU": device, "CPU": host}
    return _messages(True, {medium: dict.fromkeys(map(event_hash, hashes), True) for medium, hashes in media.items()})


def changes_of(events: Iterable[BlockStored | BlockRemoved | AllBlocksCleared]) -> Iterator[CacheChanges]:
    """Yields what events have changed in the end."""
    anew, there = False, dict[Medium, dict[int, bool]]()
    for event in events:
        if isinstance(event, AllBlocksCleared):
            anew, there = True, {}
        elif not event.group_idx:
            blocks = there.setdefault(event.medium, {})
            blocks.update(dict.fromkeys(event.block_hashes, isinstance(event, BlockStored)))
    return _messages(anew, there)


def _messages(anew: bool, there: Mapping[Medium, Mapping[int, bool]]) -> Iterator[CacheChanges]:
    """`there` says of blocks whether the medium has them."""
    if anew:
        yield CacheChanges(anew=True)
    for medium, blocks in there.items():
        hashes = [*blocks]
        for first in range(0, len(hashes), MOST_HASHES):
            part = hashes[first : first + MOST_HASHES]
            yield CacheChanges(medium, [block for block in part if blocks[block]], [block for block in part if not blocks[block]])
