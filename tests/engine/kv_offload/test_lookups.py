"""Requests look up in the secondary tiers while that pays, by a clock that only the tiers move."""

import logging

import pytest
from starling_engine.config import TiersConfig
from starling_engine.kv_offload.log_throttle import LOG_INTERVAL
from starling_engine.kv_offload.orders import TransferDone, TransferOrder
from starling_engine.kv_offload.policies import PROBE_EVERY
from starling_engine.kv_offload.stats import OffloadStats
from starling_engine.request_state import Gate

from tests.engine.kv_offload.test_offload import Secondary, emptied, engine_of, params, prompt_of, run_one
from tests.engine.toy_engine import ToyEngine

TOKEN = 1e-3
"""Seconds to compute one."""


class Slow:
    """An engine whose tier outside takes `find` seconds to look, and `fetch` seconds for each order of chunks."""

    def __init__(self, secondary: Secondary, find: float, fetch: float = 0.0, **fields: object) -> None:
        self.engine: ToyEngine = engine_of(secondary=secondary, num_blocks=400, slots=200, **fields)
        self.find, self.fetch = find, fetch
        self.now = 0.0
        self.finds = 0
        self.parked = 0
        self._do = self.engine.tiers._do
        self.engine.tiers._do = self._carry_out  # type: ignore[method-assign]
        self.engine.offload.jobs.clock = lambda: self.now
        self.engine.offload.costs.token = TOKEN

    def _carry_out(self, order: TransferOrder) -> TransferDone:
        self.finds += order.kind == "look_up"
        self.now += {"look_up": self.find, "promote": self.fetch}.get(order.kind, 0.0)
        return self._do(order)

    def add(self, name: str, prompt: list[int]) -> None:
        self.engine.add(name, prompt, params(1))
        self.parked += Gate.KV_PROMOTION in self.engine.scheduler.requests[name].gates

    def ask(self, name: str, prompt: list[int]) -> int:
        """Returns the cached tokens."""
        self.add(name, prompt)
        self.engine.run()
        return self.engine.cached[name]

    @property
    def passed(self) -> int:
        return self.engine.offload.stats["filesystem"].bypassed_total


def kept(prompt: list[int]) -> Secondary:
    secondary: Secondary = {}
    run_one(engine_of(secondary=secondary), "old", prompt)
    return secondary


def test_a_store_that_finds_nothing_and_takes_long_is_asked_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow({}, find=0.1)
    for number in range(6 * PROBE_EVERY):
        assert slow.ask(str(number), prompt_of(100, number)) == 0
    assert slow.parked == 1, "all others compute at once"
    assert slow.passed == 6 * PROBE_EVERY - 1
    assert slow.finds == 1 + 5, "one in sixteen looks how it stands"
    assert [record.message for record in caplog.records] == [
        f"the secondary KV tiers take longer than computing what they find; one request in {PROBE_EVERY} looks up until then"
    ]


def test_a_store_that_finds_nothing_and_is_quick_is_always_asked() -> None:
    quick = Slow({}, find=0.003)
    for number in range(100):
        quick.ask(str(number), prompt_of(100, number))
    assert (quick.parked, quick.passed) == (100, 0)


@pytest.mark.parametrize("find, fetch", [(0.3, 0.0), (0.0, 0.3)])
def test_what_is_found_counts_against_what_was_waited(find: float, fetch: float) -> None:
    prompt = prompt_of(300)  # 256 tokens of it are found: 0.256 s
    slow, quick = Slow(kept(prompt), find, fetch), Slow(kept(prompt), find / 2, fetch / 2)
    for number in range(3 * PROBE_EVERY):
        slow.ask(f"{number}", prompt)
        quick.ask(f"{number}", prompt)
        emptied(slow.engine), emptied(quick.engine)
    assert slow.parked < 5 and slow.passed > 3 * PROBE_EVERY - 5
    assert (quick.parked, quick.passed) == (3 * PROBE_EVERY, 0)


def test_who_waits_together_shares_the_time() -> None:
    """Each of them has its chunks after those of the others, which is still sooner than it would have computed after them."""
    prompts = [prompt_of(300, number) for number in range(8)]
    secondary = {chunk: data for prompt in prompts for chunk, data in kept(prompt).items()}
    many = Slow(secondary, find=0.0, fetch=0.1)
    for _ in range(5):
        for number, prompt in enumerate(prompts):
            many.add(str(number), prompt)
        many.engine.run()
        many.engine.finished.clear()
        many.engine.waited.clear()
        emptied(many.engine)
    assert (many.parked, many.passed) == (40, 0)


@pytest.mark.parametrize("find, passes", [(0.002, False), (0.1, True)])
def test_who_finds_nothing_shares_it_too(find: float, passes: bool) -> None:
    """A burst that waits for looks one after another has waited no longer than the last of it."""
    many = Slow({}, find)
    for burst in range(20):
        for number in range(16):
            many.add(f"{burst} {number}", prompt_of(300, 16 * burst + number))
        many.engine.run()
    assert (many.passed > 0) == passes
    assert (many.parked < 320) == passes


def hung(engine: ToyEngine, monkeypatch: pytest.MonkeyPatch) -> list[TransferOrder]:
    """The tier outside answers nothing any more; returns what it was asked."""
    orders: list[TransferOrder] = []
    carry_out = engine.tiers.carry_out

    def carry_out_inside(*, all_of_it: bool = False) -> list[TransferDone]:
        orders.extend(order for order in engine.tiers.orders if order.kind in ("look_up", "promote", "write_back"))
        engine.tiers.orders = [order for order in engine.tiers.orders if order not in orders]
        return carry_out(all_of_it=all_of_it)

    monkeypatch.setattr(engine.tiers, "carry_out", carry_out_inside)
    return orders


def step_till_done(engine: ToyEngine, name: str) -> None:
    for _ in range(50):
        if name in engine.finished:
            return
        engine.step()
    raise AssertionError(name)


def test_a_probe_that_hangs_parks_nobody_and_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow({}, find=0.1)
    slow.ask("first", prompt_of(100))
    with monkeypatch.context() as patch:
        orders = hung(slow.engine, patch)
        for number in range(5 * PROBE_EVERY):
            slow.add(f"{number}", prompt_of(100, number + 1))
            step_till_done(slow.engine, f"{number}")
        assert slow.parked == 1
        assert sum(order.kind == "look_up" for order in orders) == 1
        slow.now += 3.1
        for number in range(2 * PROBE_EVERY):
            slow.add(f"late {number}", prompt_of(100, 1000 + number))
            step_till_done(slow.engine, f"late {number}")
        assert sum(order.kind == "look_up" for order in orders) == 1, "it still hangs"
        slow.engine.tiers.orders += orders
    slow.engine.run()
    assert slow.engine.offload.lookups._waited > 3, "it counts with the time for which it would have been waited for"
    assert slow.passed == 7 * PROBE_EVERY


def test_a_request_that_passes_by_looks_for_late_orders_once(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow({}, find=0.1)
    slow.ask("first", prompt_of(100))
    jobs, scans = slow.engine.offload.jobs, []
    scan = jobs.older_than
    monkeypatch.setattr(jobs, "older_than", lambda seconds: (scans.append(seconds), scan(seconds))[1])
    for number in range(PROBE_EVERY):
        slow.add(f"{number}", prompt_of(100, number + 1))
    assert slow.passed == len(scans) == PROBE_EVERY


def test_tiers_that_have_become_quick_are_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    prompt = prompt_of(300)
    slow = Slow(kept(prompt), find=2.0, fetch=0.5)
    for number in range(PROBE_EVERY):
        slow.ask(f"slow {number}", prompt)
        emptied(slow.engine)
    assert slow.parked == 1
    slow.find = slow.fetch = 0.001
    cached = []
    for number in range(20 * PROBE_EVERY):
        cached.append(slow.ask(f"quick {number}", prompt))
        emptied(slow.engine)
    assert slow.parked > 10 * PROBE_EVERY and cached[-1] == 256
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "quicker than computing again" in caplog.records[1].message


def test_a_probe_brings_what_it_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """To see what that takes; its request has ended by then."""
    prompt = prompt_of(300)
    slow = Slow(kept(prompt), find=0.1)
    policy, seen = slow.engine.offload.lookups, []
    monkeypatch.setattr(policy, "pays", lambda: False)
    monkeypatch.setattr(policy, "ended", lambda seconds, spared, *, is_probe: seen.append((round(seconds, 3), spared, is_probe)))
    for number in range(PROBE_EVERY - 1):
        slow.ask(str(number), prompt_of(100, number + 1))
    slow.fetch = 0.2
    slow.add("probes", prompt)
    slow.engine.run()
    assert slow.parked == 0
    assert seen == [(0.3, 256, True)]


def test_what_lasts_is_said_every_ten_minutes(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow({}, find=0.1)
    for number in range(10):
        slow.ask(str(number), prompt_of(100, number))
        slow.now += LOG_INTERVAL / 3.5
    assert len(caplog.records) == 3


def test_who_was_aborted_has_waited_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow({}, find=0.1)
    orders = hung(slow.engine, monkeypatch)
    slow.add("impatient", prompt_of(100))
    slow.engine.step()
    slow.now += 1
    slow.engine.scheduler.abort("impatient")
    assert slow.engine.offload.lookups._waited == pytest.approx(0.2)
    monkeypatch.undo()
    slow.engine.tiers.orders += orders
    slow.engine.run()
    assert slow.engine.offload.lookups._waited == pytest.approx(0.2)


def test_all_tiers_outside_are_passed_by() -> None:
    engine = engine_of(secondary={})
    both = TiersConfig(cpu_bytes=1, fs_path="/outside", store="mooncake://master:1")
    stats = OffloadStats(both, engine.offload.primary, 1)
    stats.bypassed()
    assert {name: tier.bypassed_total for name, tier in stats.tiers.items()} == {"cpu": 0, "filesystem": 1, "store": 1}
