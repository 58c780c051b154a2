"""The prefixes that others will ask for: those where sequences ended, and where they part.

The next turn of a conversation goes on where the last one ended: behind its output, or behind its prompt where a template leaves
reasoning out. That turn has an end of its own then, and the last one is of no use any more. But a prefix that several sequences
have gone on from is wanted again. A cache that is full of ends that nobody goes on from forgets the others.
"""

from collections import OrderedDict
from typing import Literal

End = Literal["prompt", "output", "met", "shared"]
"""The kind of a prefix's end. `met`: one sequence has gone on from there. `shared`: several have."""
MOST = 1 << 16
"""Ends that are kept."""
DECAY = 0.9
"""Factor of earlier ends' weight, with each new one that is met."""
MOSTLY = 0.9
"""Share of what is met from which on it is the usual."""


class PrefixEnds:
    """Ends by the name of their last block; those that were noted or met last are kept."""

    def __init__(self, most: int = MOST) -> None:
        self._ends: OrderedDict[bytes, End] = OrderedDict()
        self._most = most
        self._outputs = 0.5
        """Share of outputs among the ends that were met; the latest weigh most."""

    def note(self, name: bytes, end: Literal["prompt", "output"]) -> None:
        """Notes that a sequence or its prompt ends here. What is known already stays."""
        self._ends.setdefault(name, end)
        self._ends.move_to_end(name)
        while len(self._ends) > self._most:
            self._ends.popitem(last=False)

    def meet(self, name: bytes) -> End:
        """Notes that a sequence goes on from here; returns what was known. Where none has ended, it parts from others."""
        before = self._ends.get(name)
        self._ends[name] = "met" if before in {"prompt", "output"} else "shared"
        self._ends.move_to_end(name)
        if before not in {"prompt", "output"}:
            return "shared"
        self._outputs = DECAY * self._outputs + (1 - DECAY) * (before == "output")
        return before

    @property
    def usual(self) -> End | None:
        """The end from which nearly all go on of late, if there is one."""
        if self._outputs > MOSTLY:
            return "output"
        return "prompt" if self._outputs < 1 - MOSTLY else None

    def is_shared(self, name: bytes) -> bool:
        return self._ends.get(name) == "shared"

    def shared(self, names: list[bytes]) -> list[int]:
        """Returns the lengths of the prefixes from which several sequences went on, of one with these names."""
        return [length for length, name in enumerate(names, 1) if self._ends.get(name) == "shared"]
