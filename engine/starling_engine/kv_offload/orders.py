"""Orders of the scheduler to the ranks' tiers, and their answers. They go beside the steps: neither waits for the other."""

import msgspec

from starling_engine.kv_offload.secondary.base import TierCounters


class ChunkCopy(msgspec.Struct, frozen=True, array_like=True):
    """Copies between a slot and `blocks` of KV group `group`: the chunk's blocks from its `first`-th on."""

    slot: int
    group: int
    first: int
    blocks: list[int]


class ChunkSlot(msgspec.Struct, frozen=True, array_like=True):
    """A chunk by its block hash, and the slot that it is in or is to come to."""

    slot: int
    group: int
    name: bytes


class StoreChunks(msgspec.Struct, frozen=True, tag="store"):
    """Device -> slots, once step `after` has run on this rank.

    The blocks were confirmed by that step or before, so no later step writes to them. The rank that confirmed it may be ahead.
    """

    job: int
    after: int
    copies: list[ChunkCopy]


class LoadChunks(msgspec.Struct, frozen=True, tag="load"):
    """Slots -> device, once step `after` has run: steps of an earlier request may write to the blocks until then."""

    job: int
    after: int
    copies: list[ChunkCopy]


class LookUpChunks(msgspec.Struct, frozen=True, tag="look_up"):
    """Asks which chunks the secondary tiers have; slots do not matter."""

    job: int
    chunks: list[ChunkSlot]


class PromoteChunks(msgspec.Struct, frozen=True, tag="promote"):
    """Secondary tiers -> slots."""

    job: int
    chunks: list[ChunkSlot]


class WriteBackChunks(msgspec.Struct, frozen=True, tag="write_back"):
    """Slots -> secondary tiers."""

    job: int
    chunks: list[ChunkSlot]


Order = StoreChunks | LoadChunks | LookUpChunks | PromoteChunks | WriteBackChunks


class TierReport(msgspec.Struct, array_like=True):
    """A rank's counters of one secondary tier; all but `held` only grow. Queries and hits are in chunks."""

    held: TierCounters
    queries: int = 0
    hits: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    written_bytes: int = 0
    write_seconds: float = 0.0


class TransferDone(msgspec.Struct, tag="done"):
    """A job has ended: for each of its copies or chunks, whether it was done (or found). `seconds` it took, without waiting.

    `secondary` has the secondary tiers' counters, by name. `taken` is for how many seconds transfers to and from them held steps
    up at most, by the processor time that they took; 0 where steps compute on a device of their own.
    """

    job: int
    done: list[bool]
    seconds: float = 0.0
    secondary: dict[str, TierReport] = {}
    taken: float = 0.0


class TierStatus(msgspec.Struct, tag="tier_status"):
    """The secondary tiers' counters, by name, sent when they have changed: other engines write and evict there, too."""

    secondary: dict[str, TierReport]


def merge_status(ranks: list[TierStatus]) -> TierStatus:
    """Merges all ranks' reports."""
    return TierStatus(_merge_reports([rank.secondary for rank in ranks]))


def merge(answers: list[TransferDone]) -> TransferDone:
    """Merges all ranks' answers: what one rank could not do is not done. All look into one folder or store, for the same chunks."""
    done = [all(each) for each in zip(*(answer.done for answer in answers), strict=True)]
    secondary = _merge_reports([answer.secondary for answer in answers])
    seconds, taken = max(answer.seconds for answer in answers), max(answer.taken for answer in answers)
    return TransferDone(answers[0].job, done, seconds, secondary, taken)


def _merge_reports(ranks: list[dict[str, TierReport]]) -> dict[str, TierReport]:
    return {name: _merge([reports[name] for reports in ranks]) for name in ranks[0]}


def _merge(reports: list[TierReport]) -> TierReport:
    held = [report.held for report in reports]
    return TierReport(
        TierCounters(
            max(h.bytes for h in held),
            max(h.objects for h in held),
            sum(h.evicted for h in held),
            sum(h.corrupt for h in held),
            sum(h.errors for h in held),
            sum(h.refused for h in held),
            sum(h.full for h in held),
        ),
        max(report.queries for report in reports),
        min(report.hits for report in reports),
        sum(report.read_bytes for report in reports),
        sum(report.read_seconds for report in reports),
        sum(report.written_bytes for report in reports),
        sum(report.write_seconds for report in reports),
    )
