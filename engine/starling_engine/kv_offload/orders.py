"""What the scheduler asks of the ranks' tiers, and what they answer. Beside the steps: neither waits for the other."""

import msgspec

from starling_engine.kv_offload.secondary.base import TierCounters


class ChunkCopy(msgspec.Struct, frozen=True, array_like=True):
    """Between the slot and `blocks` of KV group `group`: those of the chunk from its `first`-th on."""

    slot: int
    group: int
    first: int
    blocks: list[int]


class ChunkSlot(msgspec.Struct, frozen=True, array_like=True):
    """A chunk by its name, and the slot that it is in or is to come to."""

    slot: int
    group: int
    name: bytes


class StoreChunks(msgspec.Struct, frozen=True, tag="store"):
    """Device -> slots, once step `after` has run here. What is read was confirmed by it or before, so no later step writes there;
    but the rank that told of the step may be ahead of this one, which has yet to write there.
    """

    job: int
    after: int
    moves: list[ChunkCopy]


class LoadChunks(msgspec.Struct, frozen=True, tag="load"):
    """Slots -> device, once step `after` has run: an earlier request's steps may still write to the blocks till then."""

    job: int
    after: int
    moves: list[ChunkCopy]


class LookUpChunks(msgspec.Struct, frozen=True, tag="find"):
    """Which of these the tiers outside have; slots do not matter."""

    job: int
    chunks: list[ChunkSlot]


class PromoteChunks(msgspec.Struct, frozen=True, tag="fetch"):
    """Tiers outside -> slots."""

    job: int
    chunks: list[ChunkSlot]


class WriteBackChunks(msgspec.Struct, frozen=True, tag="keep"):
    """Slots -> tiers outside."""

    job: int
    chunks: list[ChunkSlot]


Order = StoreChunks | LoadChunks | LookUpChunks | PromoteChunks | WriteBackChunks


class TierReport(msgspec.Struct, array_like=True):
    """What a rank did with a tier outside; all but `held` only grows. Queries and hits are chunks that requests asked for."""

    held: TierCounters
    queries: int = 0
    hits: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    written_bytes: int = 0
    write_seconds: float = 0.0


class TransferDone(msgspec.Struct, tag="done"):
    """A job has ended: for each of its moves or chunks, whether it was done (or found). `seconds` it took, without waiting.

    `far` is how the tiers outside stand now, by name. `taken` is, of what went to them or came from them, for how many seconds
    that has held steps up at most, by the processor time that it took; 0 where they compute on a device of their own.
    """

    job: int
    done: list[bool]
    seconds: float = 0.0
    far: dict[str, TierReport] = {}
    taken: float = 0.0


class TierStatus(msgspec.Struct, tag="standing"):
    """How the tiers outside stand now, by name: told when that has changed, for others write and evict there too, and so does what
    goes on beside the orders.
    """

    far: dict[str, TierReport]


def merge_standing(told: list[TierStatus]) -> TierStatus:
    """Of all ranks."""
    return TierStatus(_merge_far([each.far for each in told]))


def merge(answers: list[TransferDone]) -> TransferDone:
    """Of all ranks: what one could not do is not done. All look into one folder or store, and ask for the same chunks."""
    done = [all(each) for each in zip(*(answer.done for answer in answers), strict=True)]
    far = _merge_far([answer.far for answer in answers])
    seconds, taken = max(answer.seconds for answer in answers), max(answer.taken for answer in answers)
    return TransferDone(answers[0].job, done, seconds, far, taken)


def _merge_far(ranks: list[dict[str, TierReport]]) -> dict[str, TierReport]:
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
