"""How much of prompts goes into a step: what streams can wait for, and of each prompt not all while others wait."""

from collections.abc import Sequence

KEEP = 0.7
"""Of older measurements' weight, with each new one."""


class PrefillBudget:
    """Gives a step with decodes so many tokens of prompts that it takes about `target` seconds; 0 is no target.

    A step is taken to last as long as its decodes do, and so much longer for each token of a prompt. Both come from steps that were
    measured. At least `least` tokens go in, however long the decodes take, so that prompts go on.
    """

    def __init__(self, target: float, least: int) -> None:
        self._target = target
        self._least = least
        self._decodes = 0.0
        """Seconds of a step of decodes alone."""
        self._seconds = self._tokens = 0.0
        """What tokens of prompts took beside decodes, and how many these were; the latest weigh most."""

    def tokens(self, free: int) -> int:
        """How many of the `free` tokens of a step with decodes prompts may have; all of them until a prompt was measured."""
        if not self._target or not self._seconds:
            return free
        fitting = (self._target - self._decodes) * self._tokens / self._seconds
        return min(free, max(self._least, int(fitting)))

    def measured(self, rows: Sequence[int], seconds: float) -> None:
        """A step took so long; `rows` are the tokens of each of its rows. Those of one token count as decodes."""
        decodes = rows.count(1)
        prompts = sum(rows) - decodes
        if not prompts:
            self._decodes = KEEP * self._decodes + (1 - KEEP) * seconds if self._decodes else seconds
        elif not decodes:
            self._add(prompts, seconds)
        elif prompts >= self._least:
            # Decodes that took longer were others, which may have ended long ago.
            self._decodes = min(self._decodes, seconds)
            self._add(prompts, seconds - self._decodes)

    def _add(self, tokens: int, seconds: float) -> None:
        self._seconds = KEEP * self._seconds + seconds
        self._tokens = KEEP * self._tokens + tokens


def shares(tokens: int, wanted: Sequence[int], least: int) -> list[int]:
    """What each prompt gets of `tokens`, in their order. The first leaves half to those that want less than it does, the shortest
    before the others; half of less than twice `least` is not worth a row. What nobody wants of that goes on in their order.

    Prompts that want more wait for the first: two in one step would each read all that came before its piece, and both end later.
    """
    given = [0] * len(wanted)
    half = tokens // 2 if tokens >= 2 * least else 0
    for at in sorted(range(len(wanted)), key=wanted.__getitem__):
        if wanted[at] < wanted[0]:
            given[at] = min(wanted[at], half)
            half -= given[at]
    left = tokens - sum(given)
    for at, want in enumerate(wanted):
        more = min(want - given[at], left)
        given[at] += more
        left -= more
    return given
