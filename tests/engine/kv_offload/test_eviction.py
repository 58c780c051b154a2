"""What goes first, of what a full memory holds."""

import random

from starling_engine.config import EvictionPolicy
from starling_engine.kv.events import BlockSpan
from starling_engine.kv_offload.eviction import Arc, Lru
from starling_engine.kv_offload.primary import PrimaryIndex


def anything(_: str) -> bool:
    return False


def test_what_is_renewed_goes_last() -> None:
    lru = Lru()
    for key in "abc":
        lru.add(key)
    lru.renew("a")
    assert [lru.victim("", anything) for _ in range(4)] == ["b", "c", "a", None]


def test_renewing_is_no_second_use() -> None:
    """What is renewed still goes before what has been used again; each of the two keeps its new order."""
    arc = Arc(5)
    for key in "abcde":
        arc.add(key)
    arc.use("a")
    arc.use("b")
    for key in "dca":
        arc.renew(key)
    assert [arc.victim(key, anything) for key in "vwxyz"] == ["e", "d", "c", "b", "a"]


def serve(primary: PrimaryIndex, prompt: list[bytes]) -> int:
    """Loads the part of a prompt that is there, stores the rest, and returns how many chunks were there."""
    found = next((at for at, name in enumerate(prompt) if not primary.has((0, name))), len(prompt))
    for name in prompt[:found]:
        primary.touch((0, name))
    rest = [(at, name) for at, name in enumerate(prompt[found:], found) if not primary.has((0, name))]
    slots = {name: primary.allocate((0, name), BlockSpan([], prompt[at - 1] if at else None, (), None)) for at, name in rest}
    assert None not in slots.values()
    primary.settle({(0, name): True for name in slots})
    primary.renew([(0, name) for name in prompt])
    return found


def found_of_chats(policy: EvictionPolicy) -> float:
    """The share of chunks that chats find: 60 that come back by Zipf's law and grow, among as many prompts that come once."""
    rng, primary = random.Random(0), PrimaryIndex(200, policy)
    lengths, found, wanted = [8] * 60, 0, 0
    for turn in range(2000):
        if turn % 2:
            serve(primary, [b"once %d %d" % (turn, at) for at in range(24)])
        else:
            (chat,) = rng.choices(range(60), [1 / (rank + 1) for rank in range(60)])
            found += serve(primary, [b"chat %d %d" % (chat, at) for at in range(lengths[chat])])
            wanted += lengths[chat]
            lengths[chat] = min(24, lengths[chat] + rng.randrange(2))
    return found / wanted


def test_arc_keeps_what_comes_back_from_what_comes_once() -> None:
    """The gain for which it is there, beside what its docstring says."""
    assert round(found_of_chats("lru"), 2) == 0.36 and round(found_of_chats("arc"), 2) == 0.69
