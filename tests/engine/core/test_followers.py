"""Frontends that follow what is cached know all of it from whenever they begin, and nobody pays for it before."""

import random
from collections import Counter, defaultdict
from contextlib import aclosing
from typing import Any

import pytest
from starling_engine import SamplingParams
from starling_engine.core.followers import Followers
from starling_engine.core.messages import CacheNotice, FrontendCall, Outbox
from starling_engine.frontend.cores import CoreClients
from starling_engine.frontend.following import follow_caches
from starling_engine.kv import changes
from starling_engine.kv.changes import SNAPSHOTS, CacheChanges, FollowedGroups, changes_of
from starling_engine.kv.events import AllBlocksCleared, BlockRemoved, event_hash
from starling_engine.kv.hashing import HASH_BYTES
from starling_engine.kv.manager import KVManager
from starling_engine.kv_offload.base import OffloadManager
from starling_engine.kv_offload.secondary.base import CHUNK

from tests.engine.real_engine import running
from tests.engine.toy_engine import ToyEngine, state_of

Known = dict[str, set[int]]


def hear(known: Known, told: CacheChanges) -> None:
    if told.anew:
        known.clear()
    known[told.medium] = known.get(told.medium, set()) | {*told.stored}
    known[told.medium] -= {*told.removed}


class Core:
    """A toy engine whose cache is followed, and what each listener of each frontend knows of it."""

    def __init__(self, engine: ToyEngine) -> None:
        self.engine, self.outbox = engine, Outbox()
        self.followers = Followers(engine.kv, engine.offload or OffloadManager(), self.outbox)
        self.known: dict[bytes, dict[int, Known]] = {}

    def publish(self) -> None:
        """Does as the core's process after each step."""
        self.followers.publish(self.engine.kv.events.take())
        for frontend, message in self.outbox.take():
            assert frontend is not None and isinstance(message, CacheNotice)
            for number, known in self.known[frontend].items():
                if message.listener in (0, number):
                    hear(known, message.changes)

    def begin(self, frontend: bytes, listener: int) -> None:
        self.known.setdefault(frontend, {})[listener] = {"GPU": {-1}, "CPU": {-1}}  # of another time
        self.publish()
        self.followers.add(FrontendCall(frontend, listener))

    def leave(self, frontend: bytes) -> None:
        del self.known[frontend]
        self.followers.remove(frontend)

    def check(self) -> None:
        self.publish()
        kv, host = self.engine.kv, self.engine.offload
        there = {} if host is None else host.primary._there()
        cached = {
            "GPU": set(map(event_hash, kv.pool._cached[0] if kv.groups else ())),
            "CPU": {event_hash(name) for (group, _), span in there.items() if not group and kv.groups for name in span.hashes},
        }
        if kv.state_blocks:
            pieces = Counter(name[:HASH_BYTES] for name in kv.pool._cached[-1])
            cached["GPU" + SNAPSHOTS] = {event_hash(name) for name, count in pieces.items() if count == kv.state_blocks}
            pieces = Counter(name for group, name in there if group >= len(kv.groups))
            wanted = -(-kv.state_blocks * kv.block_size // CHUNK)
            cached["CPU" + SNAPSHOTS] = {event_hash(name) for name, count in pieces.items() if count == wanted}
        cached = {medium: blocks for medium, blocks in cached.items() if blocks}
        for listeners in self.known.values():
            for known in listeners.values():
                assert {medium: blocks for medium, blocks in known.items() if blocks} == cached
        assert self.engine.kv.events.is_open == bool(self.known)


@pytest.mark.parametrize(
    ("slots", "fields"),
    [
        pytest.param(0, {}, id="device"),
        pytest.param(20, {}, id="CPU tier"),
        pytest.param(40, {"window": 100}, id="window"),
        pytest.param(0, {"state": state_of(3), "num_blocks": 150}, id="hybrid"),
        pytest.param(30, {"state": state_of(20), "num_blocks": 250}, id="hybrid with a CPU tier"),
        pytest.param(20, {"state": state_of(20), "groups": [], "num_blocks": 180}, id="a state alone"),
    ],
)
def test_a_follower_knows_what_is_cached_from_whenever_it_begins(
    slots: int, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random traffic through a small device and a small CPU tier, with resets; followers come and go."""
    monkeypatch.setattr(changes, "MOST_HASHES", 7)
    rng = random.Random(f"{slots} {fields.get('window', 0)}")
    common = {"num_blocks": 90, "max_model_len": 400, "slots": slots, "budget": 128, "max_num_seqs": 4, "rng": rng}
    core = Core(ToyEngine(**{**common, **fields}))
    engine = core.engine
    shared = [rng.choices(range(50), k=300) for _ in range(5)]
    most: Known = defaultdict(set)
    for number in range(30):
        prompt = rng.choice(shared)[: rng.randrange(30, 300)] + rng.choices(range(50), k=rng.randrange(1, 40))
        engine.add(str(number), prompt, SamplingParams(max_tokens=rng.randrange(1, 30)))
        for _ in range(rng.randrange(12)):
            engine.step()
            core.check()
        match rng.randrange(12):
            case 0:
                engine.scheduler.reset_prefix_cache()
            case 1:
                engine.scheduler.reset_device_cache()
            case 2 | 3 | 4 | 5:
                core.begin(rng.choice([b"a", b"b"]), number + 1)
            case 6 | 7 if core.known:
                core.leave(rng.choice([*core.known]))
        core.check()
        for listeners in core.known.values():
            for known in listeners.values():
                most |= {medium: max(blocks, most[medium], key=len) for medium, blocks in known.items()}
    if engine.kv.groups:
        assert len(most["GPU"]) > 20 and (len(most["CPU"]) > 20 or not slots)
    if engine.kv.state_blocks:
        assert len(most["GPU" + SNAPSHOTS]) > 3 and (len(most["CPU" + SNAPSHOTS]) > 1 or not slots)
    for frontend in [*core.known]:
        core.leave(frontend)
    assert not engine.kv.events.is_open and (engine.offload is None or engine.offload.primary._mirror is None)


def test_a_batch_tells_what_is_so_in_the_end() -> None:
    followed, removed = FollowedGroups(1, has_state=False), BlockRemoved([1, 2], "GPU", 0)
    assert [*changes_of(followed, [BlockRemoved([1], "GPU", 1)])] == []
    assert [*changes_of(followed, [removed, AllBlocksCleared(), BlockRemoved([3], "CPU", 0)])] == [
        CacheChanges(anew=True),
        CacheChanges("CPU", removed=[3]),
    ]


def test_snapshots_are_told_as_a_medium_of_their_own() -> None:
    """Followers are told with them what a prefix is found by. Of several KV groups the first one is told."""
    events = [AllBlocksCleared(), BlockRemoved([1], "GPU", 0), BlockRemoved([2], "GPU", 1), BlockRemoved([3], "GPU", 2)]
    assert [*changes_of(FollowedGroups(2, has_state=True), events)] == [
        CacheChanges(anew=True, found_by="blocks and snapshots"),
        CacheChanges("GPU", removed=[1]),
        CacheChanges("GPU snapshots", removed=[3]),
    ]
    assert [*changes_of(FollowedGroups(0, has_state=True), events[:2])] == [
        CacheChanges(anew=True, found_by="snapshots"),
        CacheChanges("GPU snapshots", removed=[1]),
    ]


async def test_all_cores_are_one_stream_also_those_of_other_nodes() -> None:
    """Another frontend knows cores by their addresses alone, as those of another node; here both are the same one.

    The stream ends with one of them.
    """
    prompt, known = list(range(300, 340)), dict[int, Known]()
    async with running() as engine:
        await engine.complete(prompt, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        elsewhere = CoreClients(engine.config)
        for name in ("first", "second"):
            await elsewhere.add(name, *engine.cores.addresses)

        async def hear_until(counts: list[int]) -> None:
            async for some in told:
                for each in some:
                    hear(known.setdefault(each.core, {}), each.changes)
                if sorted(len(core.get("GPU", ())) for core in known.values()) == counts:
                    return
            raise AssertionError("it ended")

        async with aclosing(follow_caches(elsewhere)) as told:
            await hear_until([3, 3])
            await engine.complete(prompt[::-1], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
            await hear_until([6, 6])
            await engine.reset_prefix_cache()
            await hear_until([0, 0])
            elsewhere.remove("second")
            assert [each async for some in told for each in some] == []
        await elsewhere.close()


def test_of_a_model_that_caches_nothing_nothing_is_told() -> None:
    outbox = Outbox()
    followers = Followers(KVManager([], 1), OffloadManager(), outbox)
    followers.add(FrontendCall(b"router", 1))
    told = [message.changes for _, message in outbox.take() if isinstance(message, CacheNotice)]
    assert [(each.anew, list(each.stored)) for each in told] == [(True, [])] * len(told)
    assert told
