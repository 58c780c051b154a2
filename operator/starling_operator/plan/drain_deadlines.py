"""Times at which pods that are being deleted are killed. Agents learn them from the operator: SIGTERM does not tell."""

from starling_operator.plan.group import nodes_form_gang
from starling_operator.plan.observed import Observed, Pod


def drain_deadlines(observed: Observed) -> dict[str, float]:
    """Returns seconds since the epoch by pod UID. Pods of a gang have to end with the first of them."""
    terminating = [(pod, pod.grace_ends_at) for pod in observed.pods if pod.grace_ends_at is not None]
    gangs = {revision: nodes_form_gang(observed, revision) for revision in {pod.revision for pod, _ in terminating}}

    def ends_with(pod: Pod, other: Pod) -> bool:
        return pod is other or (gangs[pod.revision] and pod.group == other.group)

    return {pod.uid: min(end for other, end in terminating if ends_with(pod, other)) for pod, _ in terminating}
