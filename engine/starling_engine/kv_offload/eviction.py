"""Eviction policies of a full memory: least recently used, or adaptive replacement (ARC)."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Protocol, TypeVar

from starling_engine.config import EvictionPolicy

K = TypeVar("K", bound=Hashable)


class Eviction(Protocol[K]):
    """Knows the names of what is held, and how it has been used."""

    def add(self, key: K) -> None:
        """`key` is held from now on."""
        ...

    def use(self, key: K) -> None:
        """`key`, which is held, was wanted again."""
        ...

    def renew(self, key: K) -> None:
        """`key`, which is held, counts as the youngest of its kind, without having been wanted again."""
        ...

    def victim(self, incoming: K, kept: Callable[[K], bool]) -> K | None:
        """Chooses what goes so that `incoming` can come, and forgets it; None when all is `kept`."""
        ...

    def remove(self, key: K) -> None:
        """`key` is held no more, for another reason."""
        ...


class Lru(Eviction[K]):
    """Least recently used first."""

    def __init__(self) -> None:
        self._keys: OrderedDict[K, None] = OrderedDict()

    def add(self, key: K) -> None:
        self._keys[key] = None

    def use(self, key: K) -> None:
        self._keys.move_to_end(key)

    def renew(self, key: K) -> None:
        self._keys.move_to_end(key)

    def victim(self, incoming: K, kept: Callable[[K], bool]) -> K | None:  # noqa: ARG002 - whatever comes
        key = _first(self._keys, kept)
        if key is not None:
            del self._keys[key]
        return key

    def remove(self, key: K) -> None:
        del self._keys[key]


class Arc(Eviction[K]):
    """Adaptive replacement (Megiddo and Modha, FAST 2003): a scan that is used once does not push out what is used again.

    `_once` and `_again` are the paper's T1 and T2, least recently used first; `_gone_once` and `_gone_again` its ghost lists B1 and
    B2, names of what was given up; `_target` its p, how much of the memory is for what was used once.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0.0
        self._once: OrderedDict[K, None] = OrderedDict()
        self._again: OrderedDict[K, None] = OrderedDict()
        self._gone_once: OrderedDict[K, None] = OrderedDict()
        self._gone_again: OrderedDict[K, None] = OrderedDict()

    def add(self, key: K) -> None:
        if key in self._gone_once:
            del self._gone_once[key]
            self._again[key] = None
        elif key in self._gone_again:
            del self._gone_again[key]
            self._again[key] = None
        else:
            self._once[key] = None
        while self._gone_once and len(self._once) + len(self._gone_once) > self._capacity:
            self._gone_once.popitem(last=False)
        while self._gone_again and self._total() > 2 * self._capacity:
            self._gone_again.popitem(last=False)

    def use(self, key: K) -> None:
        self._once.pop(key, None)
        self._again[key] = None
        self._again.move_to_end(key)

    def renew(self, key: K) -> None:
        (self._once if key in self._once else self._again).move_to_end(key)

    def victim(self, incoming: K, kept: Callable[[K], bool]) -> K | None:
        self._adapt(incoming)
        excess = len(self._once) > self._target or (incoming in self._gone_again and len(self._once) == int(self._target))
        pairs = [(self._once, self._gone_once), (self._again, self._gone_again)]
        for held, gone in pairs if self._once and excess else reversed(pairs):
            key = _first(held, kept)
            if key is not None:
                del held[key]
                gone[key] = None
                return key
        return None

    def remove(self, key: K) -> None:
        self._once.pop(key, None)
        self._again.pop(key, None)

    def _adapt(self, incoming: K) -> None:
        """A name that was given up is wanted after all: its list was too short."""
        once, again = len(self._gone_once), len(self._gone_again)
        if incoming in self._gone_once:
            self._target = min(self._capacity, self._target + max(1.0, again / once))
        elif incoming in self._gone_again:
            self._target = max(0.0, self._target - max(1.0, once / again))

    def _total(self) -> int:
        return len(self._once) + len(self._again) + len(self._gone_once) + len(self._gone_again)


def _first(keys: OrderedDict[K, None], kept: Callable[[K], bool]) -> K | None:
    """Only what is on its way is kept, so few are passed over."""
    return next((key for key in keys if not kept(key)), None)


def make_eviction(policy: EvictionPolicy, capacity: int) -> "Eviction[K]":
    return Lru() if policy == "lru" else Arc(capacity)
