"""Gates of a canary: what routers report of it, summed up, and whether it is worse than the revision that serves."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from starling_agent.contract.router_report import FIRST_TOKEN_SECONDS, CanaryReport, RevisionCounts
from starling_crds.v1alpha1.lifecycle import CanaryStep
from starling_crds.v1alpha1.status import CanaryStatus

from starling_operator.plan.canary_notice import attempt_of
from starling_operator.plan.observed import RouterPod
from starling_operator.plan.scaling import is_believed

LEAST_ERRORS = 2
"""Fewer roll nothing back: one request may fail by chance. It only holds the step until others show what it was."""
ENOUGH_REQUESTS = 1000
"""Requests of which a single error holds no step."""
LEAST_PLACED = 20
"""Requests that are to go to the canary, from which on it has to answer half of them."""
LEAST_SHADOWED = 100
"""Requests of which some should have been compared: routers compare one of ten, while nobody waits."""
LEAST_ANSWERS = 20
"""Answers of each revision below which times to a first token say nothing."""

_NOT_COMPARED = "no tokens were compared yet, and spec.rollout.canary.compare is tokens"


@dataclass(frozen=True, slots=True)
class Judgement:
    """Outcome of the gates. All empty: they hold.

    failed   why the canary is rolled back
    waits    why its step cannot pass yet
    stuck    why it is rolled back if that stays so: there were requests enough, and more of them do not help
    """

    failed: str = ""
    waits: str = ""
    stuck: str = ""


def judge(
    routers: Sequence[RouterPod], status: CanaryStatus, step: CanaryStep, *, tokens: bool, must_compare: bool, is_over: bool
) -> Judgement:
    """Judges a canary at its step, by reports of what came since that began.

    tokens         the first answer that differs counts
    must_compare   some have to be compared
    is_over        the step's time is. Only then times count: the first answers of a new revision find no prefix in its cache
    """
    total = _sum(status.revision, _reports(routers, status).values())
    failed = _differs(total, tokens=tokens) or _fails(total, step, LEAST_ERRORS) or (_is_slow(total, step) if is_over else "")
    if failed:
        return Judgement(failed)
    silent, not_compared = unheard(routers, status), _NOT_COMPARED if must_compare and not total.compared else ""
    stuck = _refuses(total.tried) or (not_compared if _requests(total) >= LEAST_SHADOWED else "")
    return Judgement(waits=silent or _may_fail(total, step) or stuck or not_compared, stuck="" if silent else stuck)


def unheard(routers: Sequence[RouterPod], status: CanaryStatus) -> str:
    """Returns which router has yet to report of the canary's step. What is not known does not pass."""
    running = [pod for pod in routers if pod.is_running and not pod.is_going]
    if not running:
        return "no router runs that could say how it fares"
    reports = _reports(routers, status)
    silent = next((pod.name for pod in running if pod.uid not in reports), None)
    return "" if silent is None else f"router {silent} has yet to say how it fares"


def median_first_token(counts: RevisionCounts) -> float:
    """Returns seconds, by interpolation in the bucket of the median. Below half of the first bound all times count as equal."""
    half, low, below = counts.first_tokens_all / 2, FIRST_TOKEN_SECONDS[0] / 2, 0
    for bound, count in zip(FIRST_TOKEN_SECONDS, counts.first_tokens, strict=False):
        if count >= half:
            return low + (bound - low) * (half - below) / max(1, count - below)
        low, below = bound, count
    return FIRST_TOKEN_SECONDS[-1]


def _reports(routers: Sequence[RouterPod], status: CanaryStatus) -> dict[str, CanaryReport]:
    """Returns reports by a router's uid. Those of another revision, step or try of it are none."""
    answers = {pod.uid: pod.report.canary for pod in routers if pod.report is not None and is_believed(pod)}
    wanted = (status.revision, attempt_of(status))
    return {uid: found for uid, found in answers.items() if found is not None and (found.canary, found.attempt) == wanted}


def _sum(revision: str, reports: Iterable[CanaryReport]) -> CanaryReport:
    found = list(reports)
    return CanaryReport(
        canary=revision,
        stable=_counts([report.stable for report in found]),
        tried=_counts([report.tried for report in found]),
        compared=sum(report.compared for report in found),
        differing=sum(report.differing for report in found),
        difference=next((report.difference for report in found if report.difference), ""),
    )


def _counts(counts: Sequence[RevisionCounts]) -> RevisionCounts:
    return RevisionCounts(
        placed=sum(one.placed for one in counts),
        requests=sum(one.requests for one in counts),
        errors=sum(one.errors for one in counts),
        first_tokens=[sum(column) for column in zip(*(one.first_tokens for one in counts), strict=False)],
        first_tokens_all=sum(one.first_tokens_all for one in counts),
    )


def _requests(total: CanaryReport) -> int:
    """Returns requests of clients, whichever revision answered: shadows are none."""
    return total.stable.placed + total.tried.placed


def _differs(total: CanaryReport, *, tokens: bool) -> str:
    if not tokens or not total.differing:
        return ""
    return f"{total.differing} of {total.compared} compared requests got other tokens ({total.difference})"


def _fails(total: CanaryReport, step: CanaryStep, least: int) -> str:
    """Returns why more requests fail than may; "" for fewer errors than `least`."""
    failed, usual = _error_percent(total.tried), _error_percent(total.stable)
    if total.tried.errors < least or failed <= usual + step.max_error_percent:
        return ""
    return (
        f"{failed:.1f} % of {total.tried.requests} requests failed ({usual:.1f} % of {total.stable.requests} at the old revision),"
        f" and maxErrorPercent is {step.max_error_percent:g}"
    )


def _may_fail(total: CanaryReport, step: CanaryStep) -> str:
    """Returns why one error holds the step. Of many requests it holds none: with a gate of 0 % it would for ever."""
    return "" if total.tried.requests >= ENOUGH_REQUESTS else _fails(total, step, 1)


def _refuses(tried: RevisionCounts) -> str:
    """Returns how many requests the canary did not answer that were to go to it: they went elsewhere, or still wait."""
    if tried.placed < LEAST_PLACED or tried.requests >= tried.placed / 2:
        return ""
    return f"it answered {tried.requests} of {tried.placed} requests that were to go to it"


def _error_percent(counts: RevisionCounts) -> float:
    """Returns 100 also where more shadows failed than there were requests."""
    return 100 * counts.errors / max(1, counts.requests, counts.errors)


def _is_slow(total: CanaryReport, step: CanaryStep) -> str:
    if min(total.stable.first_tokens_all, total.tried.first_tokens_all) < LEAST_ANSWERS:
        return ""
    usual, seen = median_first_token(total.stable), median_first_token(total.tried)
    if seen <= usual * step.max_first_token_ratio:
        return ""
    return (
        f"the median time to a first token is {seen:.2g} s ({usual:.2g} s at the old revision),"
        f" and maxFirstTokenRatio is {step.max_first_token_ratio:g}"
    )
