"""Times of a benchmark's requests, one by one and in summary. Pure: times in, numbers out."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from starling_cli.benchmark.acceptance import Acceptance

Goals = dict[str, float]
"""Upper bounds in milliseconds by metric: {"ttft": 500}."""


@dataclass(slots=True)
class Record:
    """Times in seconds. `gaps` are those between the pieces of a stream; `error` says why there is nothing else."""

    began: float
    ttft: float = 0.0
    latency: float = 0.0
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def tpot(self) -> float | None:
        """Mean time of an output token after the first; None for outputs of one token."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    def meets(self, goals: Goals) -> bool:
        """A request counts towards goodput when it finished and every goal was met; ITL by its worst gap."""
        measured = {"ttft": self.ttft, "tpot": self.tpot or 0.0, "itl": max(self.gaps, default=0.0), "e2el": self.latency}
        return self.error is None and all(measured[name] * 1000 <= bound for name, bound in goals.items())


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread | None":
        if not seconds:
            return None
        ordered = sorted(value * 1000 for value in seconds)
        return cls(sum(ordered) / len(ordered), *(percentile(ordered, share) for share in (0.5, 0.9, 0.99)))


@dataclass(frozen=True, slots=True)
class Summary:
    """`goodput` is requests a second that met the goals; None when there were none to meet. Without drafts, `drafts` is None."""

    seconds: float
    completed: int
    failed: int
    prompt_tokens: int
    output_tokens: int
    request_rate: float
    output_rate: float
    total_rate: float
    ttft: Spread | None
    itl: Spread | None
    tpot: Spread | None
    latency: Spread | None
    goodput: float | None
    drafts: Acceptance | None
    errors: dict[str, int]


def summarize(records: Sequence[Record], seconds: float, goals: Goals | None = None, drafts: Acceptance | None = None) -> Summary:
    """`seconds` is the whole run, from the first request's start to the last one's end."""
    good = [record for record in records if record.error is None]
    prompt, output = sum(r.prompt_tokens for r in good), sum(r.output_tokens for r in good)
    errors: dict[str, int] = {}
    for record in records:
        if record.error is not None:
            errors[record.error] = errors.get(record.error, 0) + 1

    def spread(values: Callable[[Record], Sequence[float]]) -> Spread | None:
        return Spread.of([value for record in good for value in values(record)])

    return Summary(
        seconds=seconds,
        completed=len(good),
        failed=len(records) - len(good),
        prompt_tokens=prompt,
        output_tokens=output,
        request_rate=len(good) / seconds,
        output_rate=output / seconds,
        total_rate=(prompt + output) / seconds,
        ttft=spread(lambda r: [r.ttft]),
        itl=spread(lambda r: r.gaps),
        tpot=spread(lambda r: [] if r.tpot is None else [r.tpot]),
        latency=spread(lambda r: [r.latency]),
        goodput=sum(r.meets(goals) for r in good) / seconds if goals else None,
        drafts=drafts,
        errors=errors,
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Interpolates linearly between the neighbours, as numpy does."""
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def parse_goals(words: Sequence[str]) -> Goals:
    """["ttft:500", "tpot:50"], also in one word with spaces. Raises ValueError with what is possible."""
    goals: Goals = {}
    for word in " ".join(words).split():
        name, _, bound = word.partition(":")
        if name not in ("ttft", "tpot", "itl", "e2el"):
            raise ValueError(f"{word!r}: goals are ttft, tpot, itl and e2el, each with milliseconds, like ttft:500")
        try:
            goals[name] = float(bound)
        except ValueError:
            raise ValueError(f"{word!r}: milliseconds must follow the colon, like ttft:500") from None
    return goals
