"""Orders of the scheduler to the ranks' tiers, and their answers. They go beside the steps: neither waits for the other."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from starling_engine.delta import TierStats


class ChunkSlot(msgspec.Struct, frozen=True, array_like=True):
    """A chunk by its block hash, the slot that it is in or is to come to, and its blocks on the device.

    `blocks` are those that a copy reads or writes, the chunk's from its `first`-th on. `slot` is -1 where no slot matters.
    """

    slot: int
    group: int
    name: bytes
    first: int = 0
    blocks: list[int] = []


TransferKind = Literal["store", "load", "look_up", "promote", "write_back"]


class TransferOrder(msgspec.Struct, frozen=True):
    """One order, whose answer has the same number. Copies to and from the device begin once step `after` has run on the rank.

    store       device -> slots
    load        slots -> device
    look_up     asks which chunks the secondary tiers have
    promote     secondary tiers -> slots
    write_back  slots -> secondary tiers

    Blocks to store were confirmed by step `after` or before, so no later one writes to them. The rank that confirmed it may be
    ahead. To blocks that are loaded, steps of an earlier request may write until then.
    """

    job: int
    kind: TransferKind
    chunks: list[ChunkSlot]
    after: int = -1


class TransferChunks(msgspec.Struct, tag="transfer_chunks"):
    """Orders to all ranks, beside the steps. Each is answered by a TransferDone."""

    orders: list[TransferOrder]


class TransferDone(msgspec.Struct, tag="done"):
    """A job has ended: for each of its chunks, whether it was done (or found). `seconds` it took, without waiting.

    `secondary` has the secondary tiers' counters, by name. `taken` is for how many seconds transfers to and from them held steps
    up at most, by the processor time that they took; 0 where steps compute on a device of their own.
    """

    job: int
    done: list[bool]
    seconds: float = 0.0
    secondary: dict[str, TierStats] = {}
    taken: float = 0.0


class TierStatus(msgspec.Struct, tag="tier_status"):
    """The secondary tiers' counters, by name, sent when they have changed: other engines write and evict there, too."""

    secondary: dict[str, TierStats]


def merge_status(ranks: Sequence[TierStatus]) -> TierStatus:
    """Merges all ranks' reports."""
    return TierStatus(_merge_stats([rank.secondary for rank in ranks]))


def merge(answers: Sequence[TransferDone]) -> TransferDone:
    """Merges all ranks' answers: what one rank could not do is not done. All look into one folder or store, for the same chunks."""
    done = [all(each) for each in zip(*(answer.done for answer in answers), strict=True)]
    secondary = _merge_stats([answer.secondary for answer in answers])
    seconds, taken = max(answer.seconds for answer in answers), max(answer.taken for answer in answers)
    return TransferDone(answers[0].job, done, seconds, secondary, taken)


def _merge_stats(ranks: Sequence[dict[str, TierStats]]) -> dict[str, TierStats]:
    return {name: _merge_tier([stats[name] for stats in ranks]) for name in ranks[0]}


def _merge_tier(ranks: Sequence[TierStats]) -> TierStats:
    """Adds the ranks' own counters; contents and chunks that were looked for are the same on all of them."""
    alike = {"bytes": max, "objects": max, "queries_total": max, "hits_total": min}
    return TierStats(**{name: alike.get(name, sum)(getattr(rank, name) for rank in ranks) for name in TierStats.__struct_fields__})
