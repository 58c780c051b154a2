"""Replies of several ranks become one, and their results keep the order of the steps."""

import pytest
from starling_engine.delta import TierStats
from starling_engine.errors import RankLost
from starling_engine.executor.gather import ReplyGather, StepResults
from starling_engine.kv_offload.orders import TierStatus, TransferDone
from starling_engine.sleep import MemoryReply
from starling_engine.step import StepResult
from starling_engine.topology.epoch import Balance, ExpertLoads, Prepared, Rearranged, Switched, Unprepared
from starling_engine.worker.commands import Reply


def gather(*replies: tuple[int, Reply]) -> list[Reply]:
    """The merged replies of two ranks."""
    both = ReplyGather(2)
    return [merged for rank, reply in replies if (merged := both.add(rank, reply)) is not None]


def test_transfers_end_when_all_ranks_have_ended_theirs() -> None:
    """Jobs end in any order."""
    assert gather(
        (0, TransferDone(1, [True, True], 1.0)),
        (0, TransferDone(2, [True], 0.5)),
        (1, TransferDone(2, [True], 0.1)),
        (1, TransferDone(1, [True, False], 2.0)),
    ) == [TransferDone(2, [True], 0.5), TransferDone(1, [True, False], 2.0)]


def test_a_job_may_come_again() -> None:
    done = TransferDone(1, [True])
    assert gather((0, done), (1, done), (1, done), (0, done)) == [done, done]


def status(held: int) -> TierStatus:
    return TierStatus({"filesystem": TierStats(bytes=held)})


def test_a_status_stays_valid_until_the_rank_sends_another() -> None:
    merged = gather((0, status(1)), (0, status(2)), (1, status(1)), (1, status(5)))
    assert [each.secondary["filesystem"].bytes for each in merged if isinstance(each, TierStatus)] == [2, 5]


@pytest.mark.parametrize(
    ("errors", "merged"), [((None, None), None), ((None, "no memory"), "rank 1: no memory"), (("a", "b"), "rank 0: a; rank 1: b")]
)
def test_a_rank_that_could_not_give_its_memory_back_is_named(errors: tuple[str | None, str | None], merged: str | None) -> None:
    replies = [(rank, MemoryReply(error)) for rank, error in enumerate(errors)]
    assert gather(*replies) == gather(*reversed(replies)) == [MemoryReply(merged)]


def test_an_epoch_is_prepared_when_the_slowest_rank_is() -> None:
    assert gather(
        (1, Prepared(3, 1.0)),  # was abandoned
        (0, Prepared(4, 1.0, {"peers": ExpertLoads(1, 10, 1.0)})),
        (1, Prepared(4, 2.0, {"peers": ExpertLoads(2, 20, 1.5)})),
        (0, Switched(4)),
        (1, Switched(4)),
    ) == [Prepared(4, 2.0, {"peers": ExpertLoads(3, 30, 2.5)}), Switched(4)]


def test_one_rank_that_cannot_speaks_for_all() -> None:
    assert gather((0, Prepared(4, 1.0)), (1, Unprepared(4, "RankLost"))) == [Unprepared(4, "RankLost")]


def test_news_of_a_stage_come_from_one_rank() -> None:
    news = [Balance(0, 0.5), Rearranged(1, 0, {}, 0, 0.0, 0.5, 1.0)]
    assert gather(*((0, each) for each in news)) == news


# ---- results of steps ----


def ended(step: int, error: str | None = None) -> StepResult:
    return StepResult(step, 0, error=error)


def test_a_failed_step_stays_in_order() -> None:
    """The rank that samples has done the next one before the other reports that this one failed there, too."""
    results = StepResults(2)
    for step in (7, 8):
        results.submit(step)
    results.add(0, ended(7, "MemoryError: no more"))
    results.add(0, ended(8))
    assert not results.ready
    results.add(1, ended(7, "MemoryError: no more"))
    assert results.ready and results.pop().error == "MemoryError: no more"
    assert results.ready and results.pop().step_id == 8
    assert not results.ready and len(results) == 0


def test_a_step_that_failed_on_some_ranks_alone() -> None:
    """Results of the others, and of later steps, are of exchanges that no longer matched."""
    results = StepResults(2)
    for step in (7, 8):
        results.submit(step)
    results.add(1, ended(7, "MemoryError: no more"))
    results.add(0, ended(7))
    results.add(0, ended(8))
    assert not results.ready
    results.check_alike()
    with pytest.raises(RankLost, match="rank 1 failed at step 7, and not all others did: MemoryError: no more"):
        results.check_alike(patience=0)
