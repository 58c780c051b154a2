"""Frontends that follow what is cached know all of it from whenever they begin, and nobody pays for it before."""

import random
from contextlib import aclosing

import pytest
from starling_engine import SamplingParams
from starling_engine.core.followers import Followers
from starling_engine.core.messages import CacheNotice, FrontendCall, Outbox
from starling_engine.frontend.cores import CoreClients
from starling_engine.frontend.following import follow_caches
from starling_engine.kv import changes
from starling_engine.kv.changes import CacheChanges, changes_of
from starling_engine.kv.events import AllBlocksCleared, BlockRemoved, event_hash
from starling_engine.kv.manager import KVManager
from starling_engine.kv_offload.base import OffloadManager

from tests.engine.real_engine import running
from tests.engine.toy_engine import ToyEngine

Known = dict[str, set[int]]


def hear(known: Known, told: CacheChanges) -> None:
    if told.anew:
        known["GPU"], known["CPU"] = set(), set()
    known[told.medium] |= {*told.stored}
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
        host = self.engine.offload.primary if self.engine.offload else None
        there = () if host is None else (span for (group, _), span in host._there().items() if not group)
        cached = {
            "GPU": set(map(event_hash, self.engine.kv.pool._cached[0])),
            "CPU": {event_hash(name) for span in there for name in span.hashes},
        }
        assert all(known == cached for listeners in self.known.values() for known in listeners.values())
        assert self.engine.kv.events.is_open == bool(self.known)


@pytest.mark.parametrize(("slots", "window"), [(0, 0), (20, 0), (40, 100)], ids=["device", "CPU tier", "window"])
def test_a_follower_knows_what_is_cached_from_whenever_it_begins(slots: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random traffic through a small device and a small CPU tier, with resets; followers come and go."""
    monkeypatch.setattr(changes, "MOST_HASHES", 7)
    rng = random.Random(f"{slots} {window}")
    core = Core(ToyEngine(num_blocks=90, max_model_len=400, slots=slots, window=window, budget=128, max_num_seqs=4, rng=rng))
    engine = core.engine
    shared = [rng.choices(range(50), k=300) for _ in range(5)]
    most: Known = {"GPU": set(), "CPU": set()}
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
                most = {medium: max(blocks, known[medium], key=len) for medium, blocks in most.items()}
    assert len(most["GPU"]) > 20 and (len(most["CPU"]) > 20 or not slots)
    for frontend in [*core.known]:
        core.leave(frontend)
    assert not engine.kv.events.is_open and (engine.offload is None or engine.offload.primary._mirror is None)


def test_a_batch_tells_what_is_so_in_the_end() -> None:
    removed = BlockRemoved([1, 2], "GPU", 0)
    assert [*changes_of([BlockRemoved([1], "GPU", 1)])] == []
    assert [*changes_of([removed, AllBlocksCleared(), BlockRemoved([3], "CPU", 0)])] == [
        CacheChanges(anew=True),
        CacheChanges("CPU", removed=[3]),
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
