"""KV events of the CPU tier: with those of the device, a listener knows what the engine would find of any prompt."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from starling_engine import SamplingParams
from starling_engine.kv_offload.orders import TransferDone
from starling_engine.kv_offload.secondary.base import CHUNK

from tests.engine.listener import Cleared, Follower, Removed, Router, Stored, heard, listening, publisher_port
from tests.engine.real_engine import running
from tests.engine.toy_engine import ToyEngine

ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
Secondary = dict[tuple[int, bytes], Any]


def engine_of(**fields: Any) -> ToyEngine:
    return ToyEngine(**{"num_blocks": 60, "max_model_len": 400, "slots": 12, "budget": 128, "events": True, **fields})


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(50), k=length)


def listen(engine: ToyEngine, router: Router) -> None:
    """The router hears what there is, and knows the two tiers then."""
    assert engine.log is not None and engine.offload is not None
    router.hear(heard(engine.log))
    assert router.known("GPU") == {g: set(names) for g, names in enumerate(engine.kv.pool._cached) if names}
    host, there = engine.offload.primary, {}
    for group, name in filter(host.has, host._slots):
        there.setdefault(group, set()).update(router.blocks_of(name, CHUNK // engine.kv.block_size))
    assert router.known("CPU") == there


class Failing:
    """Carries out the toy's orders; some copies between slots and blocks come to nothing."""

    def __init__(self, engine: ToyEngine, rng: random.Random) -> None:
        self._do, self._rng = engine.tiers._do, rng
        self.failed = 0

    def __call__(self, order: Any) -> TransferDone:
        done = self._do(order)
        if order.kind in ("store", "load") and self._rng.random() < 0.2:
            done = msgspec.structs.replace(done, done=[each and self._rng.random() < 0.5 for each in done.done])
            self.failed += not all(done.done)
        return done


@pytest.mark.parametrize(
    ("block_size", "window", "policy", "far"),
    [(8, 0, "lru", False), (32, 0, "arc", False), (16, 100, "lru", False), (8, 0, "arc", True), (32, 100, "lru", True)],
)
def test_a_router_knows_what_both_tiers_know(
    block_size: int, window: int, policy: str, far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random traffic through a small device and a small CPU tier: evictions of both, copies that fail, preemptions, resets."""
    rng = random.Random(f"{block_size} {window} {policy} {far}")
    secondary: Secondary | None = {} if far else None
    fields = {"depth": rng.choice([1, 2]), "rng": rng, "secondary": secondary, "max_num_seqs": 4, "slots": 40 if window else 20}
    engine = engine_of(block_size=block_size, num_blocks=900 // block_size, window=window, cpu_policy=policy, **fields)
    copies = Failing(engine, rng)
    monkeypatch.setattr(engine.tiers, "_do", copies)
    engine.tiers.fails = 0.1
    router = Router()
    stored = 0
    shared = [prompt_of(300, seed) for seed in range(5)]
    for number in range(80):
        prompt = rng.choice(shared)[: rng.randrange(30, 300)] + prompt_of(rng.randrange(1, 40), number)
        salt = rng.choice([None, None, "tenant"])
        engine.add(str(number), prompt, SamplingParams(max_tokens=rng.randrange(1, 30)), cache_salt=salt)
        for _ in range(rng.randrange(12)):
            engine.step()
            listen(engine, router)
        stored = max(stored, sum(map(len, router.known("CPU").values())))
        match rng.randrange(30):
            case 0:
                engine.scheduler.reset_prefix_cache()
            case 1:
                engine.scheduler.reset_device_cache()
        listen(engine, router)
    engine.run()
    listen(engine, router)
    assert stored and engine.offload.stats["cpu"].evictions_total and copies.failed
    assert engine.scheduler.stats.external_hits_total


def test_what_is_copied_is_told_before_the_device_gives_it_up() -> None:
    class Watchful(Router):
        copied = 0

        def _store(self, event: Stored) -> None:
            if event.medium == "CPU":
                assert self.cached["GPU"][0].issuperset(self.names[said] for said in event.block_hashes)
                self.copied += 1
            super()._store(event)

    engine, router = engine_of(rng=random.Random(1)), Watchful()
    for number in range(20):
        engine.add(str(number), prompt_of(200, number), SamplingParams(max_tokens=20))
        while engine.scheduler.has_work:
            engine.step()
            listen(engine, router)
    assert router.copied > 20


def test_a_device_that_forgets_leaves_the_cpu_tier() -> None:
    """As before a sleep: AllBlocksCleared would take from routers what is still here."""
    engine, router = engine_of(secondary={}), Router()
    engine.add("a", prompt_of(200), ONE)
    engine.run()
    listen(engine, router)
    assert len(router.cached["CPU"][0]) == 3 * CHUNK // 8
    engine.scheduler.reset_device_cache()
    assert engine.log is not None
    (event,) = heard(engine.log)
    assert isinstance(event, Removed) and event.medium == "GPU"
    assert {router.names[said] for said in event.block_hashes} == router.cached["GPU"][0]
    engine.scheduler.reset_prefix_cache()
    assert heard(engine.log) == [Cleared()]


def test_a_reset_while_chunks_are_copied_says_nothing_of_them_again() -> None:
    engine, router = engine_of(secondary={}), Router()
    engine.add("a", prompt_of(200), ONE)
    while not engine.tiers.orders:
        engine.step()
        engine.tiers.orders += engine.offload.take_orders()
    engine.scheduler.reset_prefix_cache()
    listen(engine, router)
    engine.run()
    listen(engine, router)
    assert not router.known("CPU")


def test_a_chunk_is_told_as_the_blocks_that_it_was_copied_from() -> None:
    """In the form of vLLM's offloading connector; the next chunk continues its event."""
    engine = engine_of(secondary={}, block_size=32)
    prompt = prompt_of(150)
    engine.add("a", prompt, ONE, cache_salt="tenant")
    engine.run()
    assert engine.log is not None
    events = heard(engine.log)
    (device,) = [event for event in events if isinstance(event, Stored) and event.medium == "GPU"]
    (cpu,) = [event for event in events if isinstance(event, Stored) and event.medium == "CPU"]
    assert device.block_hashes == cpu.block_hashes and len(cpu.block_hashes) == 4
    assert cpu == msgspec.structs.replace(device, medium="CPU")
    assert (cpu.block_size, cpu.token_ids, cpu.parent_block_hash) == (32, prompt[:128], None)
    assert cpu.extra_keys == [("tenant",), None, None, None]


def test_nothing_is_kept_to_be_told_where_nobody_listens() -> None:
    engine = engine_of(secondary={}, events=False)
    engine.add("a", prompt_of(200), ONE)
    engine.run()
    assert len(engine.offload.primary) == 3 and engine.offload.primary._mirror is None
    sequence = engine.kv.new_sequence(b"")
    sequence.chain.extend(prompt_of(200), 200)
    assert engine.kv.span(sequence, prompt_of(200), 0, 8).tokens == ()


# ---- over ZeroMQ ----


@pytest.fixture
def context() -> Iterator["zmq.Context[Any]"]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


async def test_a_router_foretells_what_an_engine_finds(context: "zmq.Context[Any]") -> None:
    """A device of 64 blocks, 12 chunks of host memory, prompts that need more than both; between them a sleep, then a reset."""
    port, rng, router = publisher_port(), random.Random(4), Router()
    follower, found = Follower(context, port), Counter[str]()
    shared = [rng.choices(range(300, 4000), k=300) for _ in range(6)]

    def prompt() -> list[int]:
        return rng.choice(shared)[: rng.randrange(60, 300)] + rng.choices(range(300, 4000), k=rng.randrange(1, 30))

    memory = {"kv_cache_memory_bytes": 5 << 20, "kv_cpu_bytes": 4 << 20}
    async with running(kv_events=f"tcp://*:{port}", **memory) as engine:
        with listening(context, port) as sub:

            def hear(quiet_ms: int = 100) -> Iterator[None]:
                """Stops where the router knows what the engine may have known when it looked for a prompt."""
                for batch in follower.batches(sub, quiet_ms):
                    yield
                    # A step makes room in slots before it looks what there is. What it has only just stored may go again, too.
                    gone = [event for event in batch.events if isinstance(event, Removed) and router.has_in_slots(event)]
                    router.hear(gone)
                    yield
                    router.hear([event for event in batch.events if event not in gone])

            for number in range(24):
                if number % 4 == 3:
                    await asyncio.gather(*(engine.complete(prompt(), ONE) for _ in range(4)))
                if number == 16:
                    await engine.sleep(2)
                    await engine.wake_up()
                list(hear())
                if number == 16:
                    assert not router.known("GPU") and router.known("CPU") and router.cleared == 1
                tokens = prompt()
                device = router.forecast(tokens, 16, media=("GPU",))
                forecasts = [router.forecast(tokens, 16)]
                cached = (await engine.complete(tokens, ONE)).num_cached_tokens
                forecasts += [router.forecast(tokens, 16) for _ in hear()]  # chunks may have been on their way
                assert cached in forecasts
                found["as foretold"] += cached == forecasts[0]
                found["on the device"] += cached == device > 0
                found["in the CPU tier"] += cached > device
            assert len(router.cached["CPU"][0]) > 8 * 4, "of 12 chunks with 4 blocks each"
            await engine.reset_prefix_cache()
            list(hear(1000))
            assert router.cleared == 2 and not router.known("GPU") and not router.known("CPU")
    assert found["as foretold"] > 20 and found["on the device"] > 2 and found["in the CPU tier"] > 2, found
