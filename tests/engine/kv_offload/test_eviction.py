"""What goes first, of what a full memory holds."""

from starling_engine.kv_offload.eviction import Arc, Lru


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
