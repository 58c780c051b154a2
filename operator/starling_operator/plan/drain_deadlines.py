"""Times at which pods that are being deleted are killed. Agents learn them from the operator: SIGTERM does not tell."""

from starling_operator.plan.group import nodes_form_gang
from starling_operator.plan.observed import Observed


def drain_deadlines(observed: Observed) -> dict[str, float]:
    """Returns seconds since the epoch by pod UID. Pods of a gang have to end with the first of them."""
    terminating = [(pod, pod.grace_ends_at) for pod in observed.pods if pod.grace_ends_at is not None]
    gangs = {revision: nodes_form_gang(observed, revision) for revision in {pod.revision for pod, _ in terminating}}
    first: dict[str, float] = {}
    for pod, end in terminating:
        first[pod.group] = min(end, first.get(pod.group, end))
    return {pod.uid: first[pod.group] if gangs[pod.revision] else end for pod, end in terminating}
