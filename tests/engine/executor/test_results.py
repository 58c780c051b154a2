"""An executor's order of the results that its ranks send."""

import pytest
from starling_engine.errors import RankLost
from starling_engine.executor.results import StepResults
from starling_engine.step import StepResult


def ended(step: int, error: str | None = None) -> StepResult:
    return StepResult(step, 0, [], error=error)


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
