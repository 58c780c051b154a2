"""Orders of the scheduler to the ranks' tiers, and their answers. They go beside the steps: neither waits for the other."""

from collections.abc import Sequence

import msgspec

from starling_engine.delta import TierStats

HUNG_SECONDS = 30.0
"""What takes longer is not expected to end any moment: an order as the scheduler sees it, the copy of one chunk on a rank."""


class ChunkSlot(msgspec.Struct, frozen=True, array_like=True):
    """A chunk by its block hash, the slot that it is in or is to come to, and the device's blocks that a copy reads or writes.

    The blocks are the chunk's from its `first`-th on. `slot` is -1 where no slot matters.
    """

    slot: int
    group: int
    name: bytes
    first: int = 0
    blocks: list[int] = []


class TransferOrder(msgspec.Struct, frozen=True):
    """One order, whose answer has the same number. Copies begin once step `after` has run on the rank."""

    job: int
    chunks: list[ChunkSlot]
    after: int = -1


class StoreChunks(TransferOrder, frozen=True, tag="store"):
    """Device -> slots.

    The blocks were confirmed by step `after` or before, so no later step writes to them. The rank that confirmed it may be ahead.
    """


class LoadChunks(TransferOrder, frozen=True, tag="load"):
    """Slots -> device. Until step `after` has run, steps of an earlier request may write to the blocks."""


class LookUpChunks(TransferOrder, frozen=True, tag="look_up"):
    """Asks which chunks the secondary tiers have."""


class PromoteChunks(TransferOrder, frozen=True, tag="promote"):
    """Secondary tiers -> slots."""


class WriteBackChunks(TransferOrder, frozen=True, tag="write_back"):
    """Slots -> secondary tiers."""


Order = StoreChunks | LoadChunks | LookUpChunks | PromoteChunks | WriteBackChunks


class TransferChunks(msgspec.Struct, tag="transfer_chunks"):
    """Orders to all ranks, beside the steps. Each is answered by a TransferDone."""

    orders: list[Order]


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
