"""Names of blocks that sequences had, whether or not these are cached still: they tell where prompts part."""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import takewhile

MOST = 1 << 16
"""Names that are kept: 128 bytes each, and a million tokens in blocks of 16."""


class SeenBlocks:
    """The last names that were seen. The pool may have none of them: of a state alone, or behind a window.

    `version` grows with each new name: what was looked up holds while it stays the same.
    """

    def __init__(self, most: int = MOST) -> None:
        self.version = 0
        self._names: OrderedDict[bytes, None] = OrderedDict()
        self._most = most

    def add(self, names: Iterable[bytes]) -> None:
        """Notes names, the last ones of which are forgotten last."""
        for name in names:
            self.version += name not in self._names
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > self._most:
            self._names.popitem(last=False)

    def num_leading(self, names: list[bytes]) -> int:
        """Returns the number of leading names that were seen. They are forgotten last from now on, the first one after all others.

        Sequences that begin at a snapshot do not add what lies before it again.
        """
        leading = list(takewhile(self._names.__contains__, names))
        for name in reversed(leading):
            self._names.move_to_end(name)
        return len(leading)
