"""What an executor makes of what its ranks say of their steps."""

import pytest
from starling_engine.errors import RankLost
from starling_engine.executor.results import StepResults
from starling_engine.step import StepResult


def ended(step: int, error: str | None = None) -> StepResult:
    return StepResult(step, 0, [], error=error)


def test_a_failed_step_keeps_its_place() -> None:
    """The rank that samples has done the next one before the other says that this one failed there too."""
    found = StepResults(2)
    for step in (7, 8):
        found.submit(step)
    found.take(0, ended(7, "MemoryError: no more"))
    found.take(0, ended(8))
    assert not found.ready
    found.take(1, ended(7, "MemoryError: no more"))
    assert found.ready and found.pop().error == "MemoryError: no more"
    assert found.ready and found.pop().step_id == 8
    assert not found.ready and len(found) == 0


def test_a_step_that_failed_on_some_ranks_alone() -> None:
    """What the others made of it, and of later ones, is of exchanges that no longer matched."""
    found = StepResults(2)
    for step in (7, 8):
        found.submit(step)
    found.take(1, ended(7, "MemoryError: no more"))
    found.take(0, ended(7))
    found.take(0, ended(8))
    assert not found.ready
    found.check_alike()
    with pytest.raises(RankLost, match="rank 1 failed at step 7, and not all others did: MemoryError: no more"):
        found.check_alike(patience=0)
