"""Chooses the engine core for a request."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

FIRST_PREFIX = 64
"""Tokens of the shortest prefix that is remembered; each longer one has twice as many."""
MAX_PREFIXES = 8192
LOAD_TOLERANCE = 8
"""Load beyond the least loaded core's with which a core still gets a prompt that it may have cached: two waiting requests."""


class BalancedCore(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def load(self) -> int: ...

    @property
    def failure(self) -> str | None: ...


class LoadBalancer:
    """Chooses the least loaded core, unless a core that is hardly busier got a prompt with the same beginning.

    It remembers its choices, not the cores' caches: a core that has evicted the prefix computes it again.
    """

    def __init__(self) -> None:
        self._chosen: OrderedDict[int, str] = OrderedDict()

    def choose(self, cores: Sequence[BalancedCore], prompt: Sequence[int], salt: str | None = None) -> int:
        """Returns the index of the core for `prompt` (token ids), the first of equals. A failed core only if all have failed."""
        if len(cores) == 1:
            return 0
        least = min(range(len(cores)), key=lambda i: (cores[i].failure is not None, cores[i].load))
        prefixes = list(_prefixes(prompt, salt))
        chosen = self._core_with_prefix(cores, prefixes, cores[least].load + LOAD_TOLERANCE, default=least)
        for prefix in prefixes:
            self._chosen[prefix] = cores[chosen].name
            self._chosen.move_to_end(prefix)
        while len(self._chosen) > MAX_PREFIXES:
            self._chosen.popitem(last=False)
        return chosen

    def _core_with_prefix(self, cores: Sequence[BalancedCore], prefixes: list[int], most: int, default: int) -> int:
        """Returns the core that got the longest of the prefixes, if it still exists and has a load of at most `most`."""
        name = next((self._chosen[p] for p in reversed(prefixes) if p in self._chosen), None)
        fits = (i for i, core in enumerate(cores) if core.name == name and core.failure is None and core.load <= most)
        return next(fits, default)


def _prefixes(prompt: Sequence[int], salt: str | None) -> list[int]:
    """Returns hashes of the prompt's beginnings, shortest first."""
    found, size = [], FIRST_PREFIX
    while size <= len(prompt):
        found.append(hash((salt, *prompt[:size])))
        size *= 2
    return found
