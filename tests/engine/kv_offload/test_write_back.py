"""When chunks are written outside: steps that compute with the same processors come first, by a clock that steps move."""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from starling_engine.kv_offload.costs import KEEPING, LONGEST_DEBT, REPAID, SAVED_UP
from starling_engine.kv_offload.orders import Order, TransferDone, WriteBackChunks
from starling_engine.kv_offload.write_back import AT_ONCE, CALM, FIRST_PAUSE, LONGEST_PAUSE
from starling_engine.step import StepPlan, StepResult

from tests.engine.kv_offload.test_offload import Outside, engine_of, params, prompt_of, run_one
from tests.engine.toy import ToyEngine

STEP = 0.1
"""Seconds."""
CHUNKS = 4
"""Whole chunks of the prompts here, and all of their tokens in one step."""


@dataclass
class Busy:
    """An engine of which a step takes STEP, and each chunk that is written outside `taken` seconds of the processors."""

    taken: float
    fields: dict[str, object] = field(default_factory=dict)
    outside: Outside = field(default_factory=dict)
    now: float = 0.0
    orders: list[int] = field(default_factory=list)
    """Chunks of each order to write."""

    def __post_init__(self) -> None:
        self.engine: ToyEngine = engine_of(
            **{"outside": self.outside, "num_blocks": 200, "slots": 100, "budget": 400, **self.fields}
        )
        self._do, self._execute = self.engine.tiers._do, self.engine.worker.execute
        self.engine.tiers._do = self._carry_out  # type: ignore[method-assign]
        self.engine.worker.execute = self._compute  # type: ignore[method-assign]
        self.engine.offload._jobs._clock = lambda: self.now

    def _carry_out(self, order: Order) -> TransferDone:
        done = self._do(order)
        if isinstance(order, WriteBackChunks):
            done.taken = self.taken * len(order.chunks)
            self.orders.append(len(order.chunks))
        return done

    def _compute(self, plan: StepPlan) -> StepResult:
        self.now += STEP
        result = self._execute(plan)
        result.seconds = STEP
        return result

    def serve(self, first: int, count: int) -> None:
        """Prompts of which one begins when the other ends, so that there is always one to compute."""
        self.engine.add(str(first), prompt_of(300, first), params(2))
        for number in range(first, first + count):
            if number + 1 < first + count:
                self.engine.add(str(number + 1), prompt_of(300, number + 1), params(2))
            while str(number) not in self.engine.finished:
                self.engine.step()

    def rest(self, seconds: float) -> None:
        self.now += seconds
        self.engine.step()
        self.engine.run()

    @property
    def unwritten(self) -> int:
        return self.engine.offload.counts.tiers["filesystem"].unwritten_total


def test_steps_lose_a_small_share_and_an_idle_engine_writes_the_rest() -> None:
    busy = Busy(0.005)
    busy.serve(0, 20)
    share = busy.taken * sum(busy.orders) / busy.now
    assert KEEPING / 2 < share <= KEEPING + (SAVED_UP + AT_ONCE) / busy.now
    assert busy.engine.offload.moving, "there is more to write"
    busy.engine.step()
    before = len(busy.outside)
    busy.rest(CALM / 2)
    assert len(busy.outside) == before, "the next request may come at any moment"
    busy.rest(CALM)
    assert len(busy.outside) == 20 * CHUNKS and busy.unwritten == 0
    assert not busy.engine.offload.moving
    assert max(busy.orders) == AT_ONCE // busy.taken, "it is soon over when a request comes"


def test_what_was_written_while_idle_is_not_held_against_it() -> None:
    busy = Busy(0.005)
    busy.serve(0, 1)
    busy.rest(1.0)
    busy.rest(1.0)
    assert len(busy.outside) == CHUNKS
    before = len(busy.outside)
    busy.serve(100, 4)
    assert len(busy.outside) > before


def test_what_takes_nothing_from_steps_is_written_at_once() -> None:
    """On a GPU."""
    busy = Busy(0.0)
    busy.serve(0, 20)
    assert sum(busy.orders) >= 17 * CHUNKS, "but what the last ones have just computed"


def test_what_is_found_outside_repays_what_is_written() -> None:
    busy = Busy(0.05)
    for number in range(20):
        run_one(engine_of(outside=busy.outside), f"old{number}", prompt_of(300, 1000 + number))
    busy.serve(0, 20)
    without = sum(busy.orders)
    for number in range(20):
        busy.engine.add(f"old{number}", prompt_of(300, 1000 + number), params(2))
    busy.serve(100, 20)
    spared = 20 * CHUNKS * 64 * busy.engine.offload.costs.token
    repaid = REPAID * spared / busy.taken
    assert sum(busy.orders) - without > min(repaid, 20 * CHUNKS) / 2 > without


def test_what_leaves_its_slot_before_it_is_written_is_counted() -> None:
    busy = Busy(0.05, {"slots": 8})
    busy.serve(0, 20)
    busy.rest(1.0)
    busy.rest(1.0)
    assert busy.unwritten == 20 * CHUNKS - len(busy.outside) > 0


def test_what_cannot_be_written_is_tried_again_after_a_while() -> None:
    busy = Busy(0.005)
    busy.engine.tiers.fails = 1.0
    busy.serve(0, 4)
    tried: list[float] = []
    for _ in range(600):
        before = len(busy.orders)
        busy.rest(0.1)
        assert not busy.engine.offload.moving, "it is not tried all the time"
        tried += [busy.now] * (len(busy.orders) - before)
    pauses = [later - sooner for sooner, later in pairwise(tried)]
    assert pauses[:3] == pytest.approx([2 * FIRST_PAUSE, 4 * FIRST_PAUSE, 8 * FIRST_PAUSE], abs=0.2)
    assert len(pauses) >= 5 and pauses[3:] == pytest.approx([LONGEST_PAUSE] * len(pauses[3:]), abs=0.2)
    busy.engine.tiers.fails = 0.0
    busy.rest(LONGEST_PAUSE)
    assert len(busy.outside) == 4 * CHUNKS and busy.unwritten == 0


def test_failures_do_not_make_writing_look_cheap() -> None:
    busy = Busy(0.005)
    busy.serve(0, 4)
    busy.rest(1.0)
    busy.rest(1.0)
    busy.engine.tiers.fails, busy.taken = 1.0, 0.0
    for number in range(10, 40):
        busy.serve(number, 1)
        busy.rest(LONGEST_PAUSE)
    busy.engine.tiers.fails, busy.taken = 0.0, 0.005
    busy.orders.clear()
    busy.rest(LONGEST_PAUSE)
    assert sum(busy.orders) > 32 and max(busy.orders) == AT_ONCE // busy.taken


def test_portions_grow_by_and_by() -> None:
    """Chunks that another engine has written take nothing: the next ones may not be there yet."""
    busy = Busy(0.0)
    busy.serve(0, 20)
    assert all(now <= max(2 * before, CHUNKS) for before, now in pairwise(busy.orders))


def test_a_request_that_arrives_in_a_pause_comes_first() -> None:
    busy = Busy(0.005)
    busy.serve(0, 10)
    busy.rest(0.0)
    busy.now += CALM
    busy.engine.step()  # has a portion written
    before = len(busy.orders)
    busy.engine.add("next", prompt_of(300, 77), params(2))
    busy.engine.offload.costs._for_keeping = -LONGEST_DEBT
    while "next" not in busy.engine.finished:
        busy.engine.step()
    assert len(busy.orders) <= before + 1, "the portion that was ordered before"


def test_one_measurement_does_not_stop_writing_for_long() -> None:
    busy = Busy(0.005)
    busy.serve(0, 2)
    busy.engine.offload.costs.kept(1, 100.0, free=False)
    began = len(busy.orders)
    busy.serve(100, int(1.5 * LONGEST_DEBT / KEEPING / STEP))
    assert len(busy.orders) > began
