"""KV events: what a listener with vLLM's own structures hears, and that it then knows what is cached."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest
import zmq
from starling_agent.contract.listening import has_ipv6
from starling_engine import SamplingParams
from starling_engine.errors import ConfigError
from starling_engine.kv import publisher
from starling_engine.kv.event_endpoint import EventEndpoint, parse_endpoint
from starling_engine.kv.events import AllBlocksCleared, BlockRemoved, BlockSpan, EventLog, event_hash
from starling_engine.kv.hashing import HASH_BYTES
from starling_engine.kv.publisher import EventPublisher
from starling_engine.kv.spec import KVGroup, KVSpec, LatentSpec

from tests.engine.listener import Cleared, Removed, Router, Stored, heard, listening, publisher_port, replay, take
from tests.engine.real_engine import running
from tests.engine.toy_engine import ToyEngine, state_of

PUBLISHED = [AllBlocksCleared()]


@pytest.mark.parametrize("window", [0, 24])
@pytest.mark.parametrize("seed", range(4))
def test_a_router_knows_the_pools_cache(seed: int, window: int) -> None:
    """Random traffic in a small pool, with and without salts, evictions and resets."""
    rng = random.Random(seed)
    engine = ToyEngine(num_blocks=40, window=window, depth=rng.choice([1, 2]), events=True)
    assert engine.log is not None
    router = Router()
    prefixes = [[rng.randrange(50) for _ in range(48)] for _ in range(4)]
    for number in range(60):
        prompt = rng.choice(prefixes)[: rng.randrange(8, 48)] + [rng.randrange(50) for _ in range(rng.randrange(1, 20))]
        salt = rng.choice([None, None, "tenant"])
        engine.add(str(number), prompt, SamplingParams(max_tokens=rng.randrange(1, 30)), cache_salt=salt)
        for _ in range(rng.randrange(12)):
            engine.step()
        if rng.random() < 0.1:
            engine.scheduler.reset_prefix_cache()
        router.hear(heard(engine.log))
        assert {g: set(names) for g, names in enumerate(engine.kv.pool._cached) if names} == router.known("GPU")
    engine.run()
    engine.scheduler.reset_prefix_cache()
    assert heard(engine.log) == [Cleared()]
    expected = {("full_attention", None)} | ({("sliding_window", window)} if window else set())
    assert router.kinds == expected


@pytest.mark.parametrize("groups", [None, []], ids=["beside keys and values", "alone"])
def test_a_router_that_reads_snapshots_foretells_what_is_found(groups: list[KVGroup] | None) -> None:
    """Chats in a small pool, of which turns come back. Snapshots lose some of their blocks, or all, at any time."""
    rng = random.Random(3)
    engine = ToyEngine(num_blocks=48, state=state_of(3), groups=groups, events=True)
    assert engine.log is not None
    router, hits, by_keys = Router(), [], 0
    chats = [[rng.randrange(50) for _ in range(24)] for _ in range(6)]
    for number in range(80):
        chat = rng.choice(chats)
        prompt = chat[: rng.randrange(9, 100)]
        router.hear(heard(engine.log))
        said = router.forecast_of_state(prompt, engine.kv.block_size)
        by_keys += said < router.forecast(prompt, engine.kv.block_size, ("GPU",))
        engine.add(str(number), prompt, SamplingParams(max_tokens=rng.randrange(1, 20), ignore_eos=True))
        engine.run()
        assert engine.cached[str(number)] == said, f"prompt {number}"
        hits.append(said)
        if prompt == chat and len(chat) < 80:
            chat += engine.outputs[str(number)] + [rng.randrange(50) for _ in range(6)]
        router.hear(heard(engine.log))
        pieces = Counter(name[:HASH_BYTES] for name in engine.kv.pool._cached[-1])
        assert router.snapshots["GPU"] == {event_hash(name) for name, count in pieces.items() if count == 3}
        if rng.random() < 0.05:
            engine.scheduler.reset_prefix_cache()
    assert sum(map(bool, hits)) > 20 and (by_keys > 10 or groups == [])
    assert ("mamba", None) in router.kinds and len(router.kinds) == (2 if groups is None else 1)


def test_a_reset_beside_running_requests_removes_the_rest_only() -> None:
    engine = ToyEngine(events=True)
    assert engine.log is not None
    engine.add("ended", list(range(20)), SamplingParams(max_tokens=1))
    engine.run()
    engine.add("running", [7] * 20, SamplingParams(max_tokens=60))
    engine.step()
    router = Router()
    router.hear(heard(engine.log))
    engine.scheduler.reset_prefix_cache()
    events = heard(engine.log)
    assert [type(event) for event in events] == [Removed]
    router.hear(events)
    assert router.known("GPU") == {0: set(engine.kv.pool._cached[0])} and len(router.cached["GPU"][0]) == 2


def test_salts_and_latents_are_published() -> None:
    log = EventLog([KVGroup(LatentSpec(8, 1, 8, 4), (0,)), KVGroup(KVSpec(8, 1, 8, 4), (1,))])
    for group in (0, 1):
        log.stored(group, BlockSpan([b"1" * 32], None, [1] * 8, "salt"))
    for group in (0, 1):
        log.stored(group, BlockSpan([b"2" * 32], b"1" * 32, [2] * 8, "salt"))
    log.stored(0, BlockSpan([b"9" * 32], b"8" * 32, [3] * 8, None))
    _, first, second, other = heard(log)
    assert isinstance(first, Stored) and isinstance(other, Stored)
    assert first.token_ids == [1] * 8 + [2] * 8
    assert first.extra_keys == [("salt",), None]
    assert (first.kv_cache_spec_kind, second.kv_cache_spec_kind) == ("mla_attention", "full_attention")
    assert other.parent_block_hash == int.from_bytes(b"8" * 8, "big") and other.extra_keys == [None]


def test_the_bytes_are_those_that_vllm_sends() -> None:
    """Positional batch, events as maps: what kthena's issue 1535 shows of vLLM 0.26; a hash is the last 64 bits."""
    log = EventLog([KVGroup(KVSpec(8, 1, 8, 4), (0,))])
    log.take()
    log.stored(0, BlockSpan([b"h" * 32], None, list(range(8)), None))
    log.removed(0, [b"h" * 32])
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(publisher.KVEventBatch(1.5, log.take(), 0)))
    hashed = int.from_bytes(b"h" * 8, "big")
    stored = {
        "type": "BlockStored",
        "block_hashes": [hashed],
        "parent_block_hash": None,
        "token_ids": list(range(8)),
        "block_size": 8,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    assert decoded == [1.5, [stored, {"type": "BlockRemoved", "block_hashes": [hashed], "medium": "GPU", "group_idx": 0}], 0]


# ---- over ZeroMQ ----


@pytest.fixture
def context() -> Iterator["zmq.Context[Any]"]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def subscribed(events: EventPublisher, sub: "zmq.Socket[bytes]") -> int:
    """Publishes until the last one is heard, so that nothing is on its way; returns its number."""
    for _ in range(2000):
        events.publish(PUBLISHED)
        while sub.poll(10):
            number = take(sub)[1]
            if number == events._number - 1:
                return number
    raise AssertionError("nothing came")


def test_missed_batches_are_replayed(context: "zmq.Context[Any]") -> None:
    port = publisher_port()
    with closing(EventPublisher(f"tcp://*:{port}/kv@pod@model", rank=0)) as events, listening(context, port, "kv@") as sub:
        last = subscribed(events, sub)
        sub.disconnect(f"tcp://127.0.0.1:{port}")
        time.sleep(0.1)
        for said in (1, 2, 3):
            events.publish([BlockRemoved([said], "GPU", 0)])
        sub.connect(f"tcp://127.0.0.1:{port}")
        current = subscribed(events, sub)
        assert current > last + 3
        missed = replay(context, port, last + 1)
        assert [number for number, _ in missed] == list(range(last + 1, current + 1))
        assert [batch.events[0].block_hashes for _, batch in missed[:3]] == [[1], [2], [3]]
        assert replay(context, port, current + 1) == []


def test_replayable_batches_are_bounded(context: "zmq.Context[Any]", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "MAX_REPLAYED", 50)
    monkeypatch.setattr(publisher, "MAX_REPLAYED_BYTES", 4000)
    port = publisher_port()
    with closing(EventPublisher(f"tcp://*:{port}")) as events:
        for _ in range(100):
            events.publish(PUBLISHED)
        assert [number for number, _ in replay(context, port, 0)] == list(range(50, 100))
        for _ in range(10):
            events.publish([BlockRemoved([2**63] * 100, "GPU", 0)])
        assert [number for number, _ in replay(context, port, 0)] == list(range(106, 110))


@pytest.mark.parametrize(("endpoint_host", "host"), [("*", "127.0.0.1"), ("*", "[::1]"), ("[::1]", "[::1]")])
def test_listeners_of_both_families_are_served(context: "zmq.Context[Any]", endpoint_host: str, host: str) -> None:
    if "::1" in host and not has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    port = publisher_port()
    with closing(EventPublisher(f"tcp://{endpoint_host}:{port}")) as events, listening(context, port, host=host) as sub:
        subscribed(events, sub)
        assert replay(context, port, 0, host)


def test_a_listener_that_does_not_read_holds_nobody_up(context: "zmq.Context[Any]") -> None:
    port = publisher_port()
    with closing(EventPublisher(f"tcp://*:{port}")) as events, listening(context, port) as sub:
        subscribed(events, sub)
        batch = [BlockRemoved([2**63] * 400, "GPU", 0)]
        slowest = 0.0
        for _ in range(30_000):
            began = time.perf_counter()
            events.publish(batch)
            slowest = max(slowest, time.perf_counter() - began)
        assert slowest < 20
        assert take(sub)[1] < 30_000


def test_ranks_have_ports_of_their_own(context: "zmq.Context[Any]") -> None:
    port = publisher_port()
    with closing(EventPublisher(f"tcp://*:{port}", rank=3)) as events, listening(context, port + 3) as sub:
        subscribed(events, sub)
        events.publish(PUBLISHED)
        topic, _, batch = take(sub)
        assert topic == b"" and batch.data_parallel_rank == 3 and abs(batch.ts - time.time()) < 60


def test_it_connects_to_a_listener_that_is_named(context: "zmq.Context[Any]") -> None:
    port = publisher_port()
    with context.socket(zmq.SUB) as sub:
        sub.bind(f"tcp://127.0.0.1:{port}")
        sub.setsockopt_string(zmq.SUBSCRIBE, "")
        with closing(EventPublisher(f"tcp://127.0.0.1:{port}")) as events:
            subscribed(events, sub)


def test_a_port_in_use_names_the_argument() -> None:
    port = publisher_port()
    with closing(EventPublisher(f"tcp://*:{port}")), pytest.raises(ConfigError, match=str(port)) as caught:
        EventPublisher(f"tcp://*:{port}")
    assert caught.value.field == "kv_events"


def test_endpoints() -> None:
    assert parse_endpoint("tcp://*:5557") == EventEndpoint("*", 5557, "") and parse_endpoint("tcp://*:5557").binds
    assert parse_endpoint("tcp://[::]:1/kv@a@b") == EventEndpoint("[::]", 1, "kv@a@b") and parse_endpoint("tcp://[::]:1").binds
    assert not parse_endpoint("tcp://router.svc:5557").binds
    for wrong in ("5557", "tcp://*", "tcp://*:0", "tcp://*:65500", "ipc:///x", "tcp://*:5557/"):
        with pytest.raises(ConfigError, match=r"tcp://\*:PORT"):
            parse_endpoint(wrong)


async def test_an_engine_publishes_events_of_its_cores(context: "zmq.Context[Any]") -> None:
    """Two data parallel ranks: each tells of its own, from the start on."""
    port = publisher_port()
    prompt = list(range(300, 340))
    async with running(kv_events=f"tcp://*:{port}", data_parallel_size=2) as engine:
        await engine.complete(prompt, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        routers = []
        for rank in range(2):
            batches = replay(context, port + rank, 0)
            assert [number for number, _ in batches] == list(range(len(batches)))
            assert all(batch.data_parallel_rank == rank for _, batch in batches)
            router = Router()
            for _, batch in batches:
                router.hear(batch.events)
            routers.append(router)
        assert all(router.cleared == 1 for router in routers)
        assert sorted(len(router.cached["GPU"][0]) for router in routers) == [0, 3]
        with pytest.raises(ConfigError, match="kv_events: cannot publish"):
            async with running(kv_events=f"tcp://*:{port}"):
                pass
        await engine.reset_prefix_cache()
        for rank in range(2):
            for _ in range(50):
                last = replay(context, port + rank, 0)[-1][1]
                if last.events == [Cleared()]:
                    break
                await asyncio.sleep(0.05)
            assert last.events == [Cleared()]
