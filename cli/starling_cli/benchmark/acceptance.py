"""Counts of draft tokens and of those accepted (speculative decoding), from counters of an engine or a server."""

from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from starling_engine.delta import Stats

PREFIX = "vllm:spec_decode_num_"


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Counters that grow: rows of steps that had drafts, their draft tokens, and those accepted, also by position."""

    rows: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()

    @classmethod
    def of(cls, stats: "Stats") -> "DraftCounts":
        by_position = tuple(stats.spec_accepted_per_position)
        return cls(stats.spec_drafts_total, stats.spec_draft_tokens_total, stats.spec_accepted_tokens_total, by_position)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """`rate` is the share of the draft tokens that were accepted, `length` the mean tokens that a row with drafts gave.

    `rate_by_position` is the share of these rows whose first, second, ... draft was accepted.
    """

    rows: int
    draft_tokens: int
    accepted_tokens: int
    rate: float
    length: float
    rate_by_position: list[float]


def accepted_between(before: DraftCounts, after: DraftCounts) -> Acceptance | None:
    """Returns what became of the drafts between two readings; None where there were none."""
    rows, tokens = after.rows - before.rows, after.draft_tokens - before.draft_tokens
    if rows <= 0 or tokens <= 0:
        return None
    accepted = after.accepted_tokens - before.accepted_tokens
    both = zip_longest(after.accepted_by_position, before.accepted_by_position, fillvalue=0)
    return Acceptance(rows, tokens, accepted, accepted / tokens, 1 + accepted / rows, [(new - old) / rows for new, old in both])


def counts_in(metrics: str) -> DraftCounts:
    """Reads vLLM's counters, which Starling has too; all zero where there are none."""
    lines = "".join(f"{line}\n" for line in metrics.splitlines() if line.startswith(PREFIX))
    totals: dict[str, int] = {}
    by_position: dict[int, int] = {}
    for family in text_string_to_metric_families(lines):
        for sample in family.samples:
            name, value = sample.name.removeprefix(PREFIX), int(sample.value)
            if name == "accepted_tokens_per_pos_total":
                position = int(sample.labels["position"])
                by_position[position] = by_position.get(position, 0) + value
            else:
                totals[name] = totals.get(name, 0) + value
    drafts, tokens, accepted = (totals.get(f"{name}_total", 0) for name in ("drafts", "draft_tokens", "accepted_tokens"))
    return DraftCounts(drafts, tokens, accepted, tuple(by_position[position] for position in sorted(by_position)))
