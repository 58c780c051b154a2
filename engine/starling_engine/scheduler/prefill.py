"""The share of a step that prompts get: as much as running streams can wait for, divided among the prompts."""

from collections.abc import Sequence

from starling_engine.config import SchedulingPolicy
from starling_engine.request_state import RequestState

DECAY = 0.7
"""Factor of older measurements' weight, with each new one."""
MOST_LED = 7
"""Steps in a row in which some prompts go before others. The next one has none that do, so that all go on."""


class PrefillBudget:
    """Limits the prompt tokens of a step with decodes, so that it takes about `target` seconds; 0 is no target.

    A step is estimated as the time of its decodes, plus a time for each token of a prompt. Both are measured. At least `least`
    tokens go in, however long the decodes take, so that prompts go on.
    """

    def __init__(self, target: float, least: int) -> None:
        self._target = target
        self._least = least
        self._decodes = 0.0
        """Seconds of a step of decodes alone."""
        self._seconds = self._tokens = 0.0
        """Seconds and number of prompt tokens next to decodes; the latest weigh most."""

    def tokens(self, free: int) -> int:
        """Returns the prompt tokens for a step with decodes, of `free` tokens; all until a prompt was measured."""
        if not self._target or not self._seconds:
            return free
        fitting = (self._target - self._decodes) * self._tokens / self._seconds
        return min(free, max(self._least, int(fitting)))

    def observe(self, rows: Sequence[int], seconds: float) -> None:
        """Takes the time of a step; `rows` has the tokens of each row. Rows of one token count as decodes."""
        decodes = rows.count(1)
        prompts = sum(rows) - decodes
        if not prompts:
            self._decodes = DECAY * self._decodes + (1 - DECAY) * seconds if self._decodes else seconds
        elif not decodes:
            self._add(prompts, seconds)
        elif prompts >= self._least:
            # The decode time may be of other, longer decodes, which ended long ago.
            self._decodes = min(self._decodes, seconds)
            self._add(prompts, seconds - self._decodes)

    def _add(self, tokens: int, seconds: float) -> None:
        self._seconds = DECAY * self._seconds + seconds
        self._tokens = DECAY * self._tokens + tokens


class PromptLead:
    """Says which prompts go before others: where requests run in order of arrival, those of a priority below 0.

    A router marks a tenant's only request so. Its prompt would wait for one of another tenant that is being computed as it comes.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._in_order = policy == "fcfs"
        self._open = set[str]()
        self._led = 0

    def add(self, request: RequestState) -> None:
        if self.has(request):
            self._open.add(request.record.id)

    def remove(self, request: RequestState) -> None:
        self._open.discard(request.record.id)

    def has(self, request: RequestState) -> bool:
        return self._in_order and request.record.priority < 0

    def begins_step(self) -> bool:
        """Returns whether prompts that lead go before others in a step that is being planned now."""
        self._led = self._led + 1 if self._open and self._led < MOST_LED else 0
        return self._led > 0


def shares(tokens: int, wanted: Sequence[int], least: int) -> list[int]:
    """Divides `tokens` among prompts that want `wanted` tokens each; returns each prompt's share, in their order.

    Half is for prompts that want less than the first one, the shortest first; with less than twice `least` tokens it is not worth a
    row. The rest goes to all in their order. Longer prompts wait for the first: with two in a step, each would read all of its own
    context, and both would end later.
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
