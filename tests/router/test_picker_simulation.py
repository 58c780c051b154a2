"""Requests go over a while to a model of backends: caches that forget the oldest blocks, and one prompt after another."""

import heapq
import itertools
import random
import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from starling_router.backend import Backend, Carried
from starling_router.index import PrefixIndex, longest_prefixes
from starling_router.picker import Picker, RouterPolicy

BLOCK, PREFILL, DECODE_SECONDS = 64, 5_000.0, 2.0
"""Tokens of a block, prompt tokens a second, and seconds from a first token to the last one."""


@dataclass(frozen=True)
class Request:
    at: float
    blocks: Sequence[int]
    session: str | None = None


@dataclass
class Engine:
    """A backend with room for so many blocks. `free_at` is when it has computed all prompts that it got."""

    backend: Backend
    index: PrefixIndex
    room: int
    free_at: float = 0.0
    computed: int = 0
    requests: int = 0
    kept: "OrderedDict[int, None]" = field(default_factory=OrderedDict)

    def take(self, at: float, blocks: Sequence[int], cached: int) -> float:
        """Returns when the first token comes."""
        tokens = len(blocks) * BLOCK - cached
        self.free_at = max(at, self.free_at) + max(1, tokens) / PREFILL
        self.computed += tokens
        self.requests += 1
        for block in reversed(blocks):
            self.kept[block] = None
            self.kept.move_to_end(block)
        self.index.add(self.backend.number, blocks)
        while len(self.kept) > self.room:
            self.index.remove(self.backend.number, [self.kept.popitem(last=False)[0]])
        return self.free_at


@dataclass(frozen=True)
class Outcome:
    engines: list[Engine]
    waits: list[float]
    cached: int
    tokens: int

    @property
    def hits(self) -> float:
        return self.cached / self.tokens

    @property
    def balance(self) -> float:
        """Most requests of an engine, to their mean."""
        counts = [engine.requests for engine in self.engines]
        return max(counts) / statistics.mean(counts)


def simulate(requests: Sequence[Request], *, room: int, engines: int = 4, policy: RouterPolicy | None = None) -> Outcome:
    """Sends requests by the picker. Backends know first tokens and ends when they come, as a router does."""
    index, picker = PrefixIndex(), Picker(policy or RouterPolicy())
    served = [Engine(Backend(f"pod-{i}", "", i, ready=True), index, room) for i in range(engines)]
    ready, waits, hits = [engine.backend for engine in served], list[float](), 0
    order, later = itertools.count(), list[tuple[float, int, Callable[[], object]]]()
    for request in requests:
        while later and later[0][0] <= request.at:
            heapq.heappop(later)[2]()
        found = {number: count * BLOCK for number, count in longest_prefixes([index], request.blocks)}
        tokens = len(request.blocks) * BLOCK
        pick = picker.pick(ready, tokens, found, request.session)
        assert pick is not None
        carrying: AbstractContextManager[Carried] = pick.backend.carrying(tokens - pick.cached)
        carried = carrying.__enter__()
        first = served[pick.backend.number].take(request.at, request.blocks, pick.cached)
        heapq.heappush(later, (first, next(order), carried.began))
        heapq.heappush(later, (first + DECODE_SECONDS, next(order), lambda end=carrying: end.__exit__(None, None, None)))
        waits.append(first - request.at)
        hits += pick.cached
    return Outcome(served, waits, hits, sum(len(request.blocks) * BLOCK for request in requests))


def chats(rng: random.Random, *, systems: int, chats: int, turns: int, every: float, session: bool = False) -> list[Request]:
    """Conversations that begin with one of a few system prompts of 1,280 tokens, and grow by 192 tokens a turn."""
    fresh = itertools.count()
    heads = [[next(fresh) for _ in range(20)] for _ in range(systems)]
    requests = []
    for number in range(chats):
        at, blocks = number * every, list(rng.choice(heads))
        for _ in range(turns):
            blocks = [*blocks, *itertools.islice(fresh, 3)]
            requests.append(Request(at, blocks, f"chat-{number}" if session else None))
            at += rng.uniform(3.0, 6.0)
    return sorted(requests, key=lambda request: request.at)


def apart(rng: random.Random, count: int, blocks: int, every: float) -> Iterator[Request]:
    """Prompts that have nothing in common."""
    at = 0.0
    for number in range(count):
        at += rng.expovariate(1 / every)
        yield Request(at, range((number + 1) * 1000, (number + 1) * 1000 + blocks))


def test_a_hot_prefix_does_not_pile_up() -> None:
    """All have the same 2,560 tokens, and come faster than one engine could answer them."""
    rng, hot = random.Random(0), [*range(40)]
    requests = [Request(one.at, [*hot, *one.blocks]) for one in apart(rng, 800, 4, 0.02)]
    outcome = simulate(requests, room=4000)
    assert outcome.balance <= 1.3
    assert outcome.hits >= 0.9 * 40 / 44
    assert statistics.median(outcome.waits) <= 0.3


def test_chats_stay_where_their_prefix_is() -> None:
    requests = chats(random.Random(1), systems=8, chats=120, turns=6, every=0.5)
    outcome = simulate(requests, room=400)
    alone = simulate(requests, room=1600, engines=1, policy=RouterPolicy(load=0.0))
    assert outcome.hits >= 0.9 * alone.hits
    assert outcome.balance <= 1.3


def test_prefixes_that_fill_the_caches_stay_apart() -> None:
    """Each engine has room for a fourth of the system prompts and chats: a prefix in two caches pushes others out of one."""
    requests = chats(random.Random(4), systems=12, chats=160, turns=6, every=0.35)
    alone = simulate(requests, room=1600, engines=1, policy=RouterPolicy(load=0.0))
    outcome = simulate(requests, room=400)
    assert outcome.hits >= 0.98 * alone.hits
    assert outcome.balance <= 1.3


def test_prompts_with_nothing_in_common_are_spread() -> None:
    outcome = simulate([*apart(random.Random(2), 400, 16, 0.1)], room=4000)
    assert outcome.balance <= 1.1


def test_light_sessions_do_not_unbalance() -> None:
    requests = chats(random.Random(3), systems=1, chats=120, turns=6, every=0.3, session=True)
    outcome = simulate(requests, room=4000)
    assert outcome.balance <= 1.3
    assert outcome.hits >= 0.8
