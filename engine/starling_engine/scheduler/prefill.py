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
    """What each prompt gets of `tokens`, in their order. It leaves those behind it what they want, up to half of what it finds;
    less than `least` is not worth a row, and stays with the first. Nothing is left over while somebody wants it.
    """
    given, behind = [], sum(wanted)
    for want in wanted:
        behind -= want
        half = tokens // 2 if tokens >= 2 * least else 0
        given.append(min(want, tokens - min(behind, half)))
        tokens -= given[-1]
    return given
