"""Chunks are written back while steps on the same processors can do without them, by a clock that steps move."""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from starling_engine.kv_offload.orders import TransferDone, TransferOrder
from starling_engine.kv_offload.policies import BURST, WRITE_SHARE
from starling_engine.kv_offload.write_back import CALM_SECONDS, ORDER_SECONDS, PAUSE
from starling_engine.step import StepMasks, StepPlan, StepResult

from tests.engine.kv_offload.test_offload import Secondary, engine_of, params, prompt_of, run_one
from tests.engine.toy_engine import ToyEngine

STEP = 0.1
"""Seconds."""
CHUNKS = 4
"""Whole chunks of the prompts here, and all of their tokens in one step."""


@dataclass
class Busy:
    """An engine of which a step takes STEP, and each chunk that is written outside `taken` seconds of the processors."""

    taken: float
    fields: dict[str, object] = field(default_factory=dict)
    secondary: Secondary = field(default_factory=dict)
    now: float = 0.0
    orders: list[int] = field(default_factory=list)
    """Chunks of each order to write."""

    def __post_init__(self) -> None:
        self.engine: ToyEngine = engine_of(
            **{"secondary": self.secondary, "num_blocks": 200, "slots": 100, "budget": 400, **self.fields}
        )
        self._do, self._execute = self.engine.tiers._do, self.engine.worker.execute
        self.engine.tiers._do = self._carry_out  # type: ignore[method-assign]
        self.engine.worker.execute = self._compute  # type: ignore[method-assign]
        self.engine.offload.jobs.clock = lambda: self.now

    def _carry_out(self, order: TransferOrder) -> TransferDone:
        done = self._do(order)
        if order.kind == "write_back":
            done.taken = self.taken * len(order.chunks)
            self.orders.append(len(order.chunks))
        return done

    def _compute(self, plan: StepPlan, masks: StepMasks | None) -> StepResult:
        self.now += STEP
        result = self._execute(plan, masks)
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
        return self.engine.offload.stats["filesystem"].unwritten_total


def test_steps_lose_a_small_share_and_an_idle_engine_writes_the_rest() -> None:
    busy = Busy(0.005)
    busy.serve(0, 20)
    share = busy.taken * sum(busy.orders) / busy.now
    assert WRITE_SHARE / 2 < share <= WRITE_SHARE + (BURST + ORDER_SECONDS) / busy.now
    assert busy.engine.offload.has_pending_work, "there is more to write"
    busy.engine.step()
    before = len(busy.secondary)
    busy.rest(CALM_SECONDS / 2)
    assert len(busy.secondary) == before, "the next request may come at any moment"
    busy.rest(CALM_SECONDS)
    assert len(busy.secondary) == 20 * CHUNKS and busy.unwritten == 0
    assert not busy.engine.offload.has_pending_work
    assert max(busy.orders) == ORDER_SECONDS // busy.taken, "it is soon over when a request comes"


def test_what_was_written_while_idle_is_not_held_against_it() -> None:
    busy = Busy(0.005)
    busy.serve(0, 1)
    busy.rest(1.0)
    busy.rest(1.0)
    assert len(busy.secondary) == CHUNKS
    before = len(busy.secondary)
    busy.serve(100, 4)
    assert len(busy.secondary) > before


def test_what_takes_nothing_from_steps_is_written_at_once() -> None:
    """On a GPU."""
    busy = Busy(0.0)
    busy.serve(0, 20)
    assert sum(busy.orders) >= 17 * CHUNKS, "but what the last ones have just computed"


def test_what_is_found_outside_repays_what_is_written() -> None:
    busy = Busy(0.05)
    for number in range(20):
        run_one(engine_of(secondary=busy.secondary), f"old{number}", prompt_of(300, 1000 + number))
    busy.serve(0, 20)
    without = sum(busy.orders)
    for number in range(20):
        busy.engine.add(f"old{number}", prompt_of(300, 1000 + number), params(2))
    busy.serve(100, 20)
    spared = 20 * CHUNKS * 64 * busy.engine.offload.costs.token
    repaid = spared / 2 / busy.taken
    assert sum(busy.orders) - without > min(repaid, 20 * CHUNKS) / 2 > without


def test_what_leaves_its_slot_before_it_is_written_is_counted() -> None:
    busy = Busy(0.05, {"slots": 8})
    busy.serve(0, 20)
    busy.rest(1.0)
    busy.rest(1.0)
    assert busy.unwritten == 20 * CHUNKS - len(busy.secondary) > 0


def test_what_cannot_be_written_is_tried_again_after_a_while() -> None:
    busy = Busy(0.005)
    busy.engine.tiers.fails = 1.0
    busy.serve(0, 4)
    tried: list[float] = []
    for _ in range(600):
        before = len(busy.orders)
        busy.rest(0.1)
        assert not busy.engine.offload.has_pending_work, "it is not tried all the time"
        tried += [busy.now] * (len(busy.orders) - before)
    pauses = [later - sooner for sooner, later in pairwise(tried)]
    assert len(pauses) >= 5 and pauses == pytest.approx([PAUSE] * len(pauses), abs=0.2)
    busy.engine.tiers.fails = 0.0
    busy.rest(PAUSE)
    assert len(busy.secondary) == 4 * CHUNKS and busy.unwritten == 0


def test_failures_do_not_make_writing_look_cheap() -> None:
    busy = Busy(0.005)
    busy.serve(0, 4)
    busy.rest(1.0)
    busy.rest(1.0)
    busy.engine.tiers.fails, busy.taken = 1.0, 0.0
    for number in range(10, 40):
        busy.serve(number, 1)
        busy.rest(PAUSE)
    busy.engine.tiers.fails, busy.taken = 0.0, 0.005
    busy.orders.clear()
    busy.rest(PAUSE)
    assert sum(busy.orders) > 32 and max(busy.orders) == ORDER_SECONDS // busy.taken


def test_a_request_that_arrives_in_a_pause_comes_first() -> None:
    busy = Busy(0.005)
    busy.serve(0, 10)
    busy.rest(0.0)
    busy.now += CALM_SECONDS
    busy.engine.step()  # has a portion written
    before = len(busy.orders)
    busy.engine.add("next", prompt_of(300, 77), params(2))
    busy.engine.offload.budget._credit = -BURST
    while "next" not in busy.engine.finished:
        busy.engine.step()
    assert len(busy.orders) <= before + 1, "the portion that was ordered before"


def test_one_measurement_does_not_stop_writing_for_long() -> None:
    busy = Busy(0.005)
    busy.serve(0, 2)
    busy.engine.offload.budget.spent(100.0)
    began = len(busy.orders)
    busy.serve(100, int(1.5 * BURST / WRITE_SHARE / STEP))
    assert len(busy.orders) > began
