"""Names of blocks that sequences had, of a model that caches no keys and values: they tell where prompts part."""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import takewhile

MOST = 1 << 16
"""Names that are kept: 128 bytes each, and a million tokens in blocks of 16."""


class SeenBlocks:
    """The last names that were seen. With keys and values, the pool knows them."""

    def __init__(self, most: int = MOST) -> None:
        self._names: OrderedDict[bytes, None] = OrderedDict()
        self._most = most

    def add(self, names: Iterable[bytes]) -> None:
        """Notes names, the last ones of which are forgotten last."""
        for name in names:
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > self._most:
            self._names.popitem(last=False)

    def num_leading(self, names: list[bytes]) -> int:
        """Returns the number of leading names that were seen."""
        return sum(1 for _ in takewhile(self._names.__contains__, names))
