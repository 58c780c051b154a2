"""Which engine core takes a request."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

FIRST_PREFIX = 64
"""Tokens of the shortest prefix that is remembered; each longer one has twice as many."""
REMEMBERED = 8192
SPARE_LOAD = 8
"""How much more loaded than the least one a core may be to get a prompt whose beginning it has cached: two waiting requests."""


class BalancedCore(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def load(self) -> int: ...

    @property
    def failure(self) -> str | None: ...


class Balancer:
    """The least loaded core, unless one that is hardly busier has taken a prompt that began the same.

    It remembers what it chose, by name, not what is cached: a core that has evicted the prefix computes it again, no more.
    """

    def __init__(self) -> None:
        self._chosen: OrderedDict[int, str] = OrderedDict()

    def choose(self, cores: Sequence[BalancedCore], prompt: Sequence[int], salt: str | None = None) -> int:
        """Index of the core for `prompt` (token ids), the first of those that are equal. One that failed only when all have."""
        if len(cores) == 1:
            return 0
        least = min(range(len(cores)), key=lambda i: (cores[i].failure is not None, cores[i].load))
        prefixes = list(_prefixes(prompt, salt))
        chosen = self._known(cores, prefixes, cores[least].load + SPARE_LOAD, default=least)
        for prefix in prefixes:
            self._chosen[prefix] = cores[chosen].name
            self._chosen.move_to_end(prefix)
        while len(self._chosen) > REMEMBERED:
            self._chosen.popitem(last=False)
        return chosen

    def _known(self, cores: Sequence[BalancedCore], prefixes: list[int], most: int, default: int) -> int:
        """The core that took the longest of the prefixes, if it is still there and not busier than `most`."""
        name = next((self._chosen[p] for p in reversed(prefixes) if p in self._chosen), None)
        fits = (i for i, core in enumerate(cores) if core.name == name and core.failure is None and core.load <= most)
        return next(fits, default)


def _prefixes(prompt: Sequence[int], salt: str | None) -> list[int]:
    """Hashes of the prompt's beginnings, shortest first."""
    found, size = [], FIRST_PREFIX
    while size <= len(prompt):
        found.append(hash((salt, *prompt[:size])))
        size *= 2
    return found
