"""When pods that go are killed, for their agents, who hear nothing of it but SIGTERM."""

from starling_operator.plan.observed import Observed, Pod
from starling_operator.plan.tied import nodes_are_tied


def deadlines(observed: Observed) -> dict[str, float]:
    """Seconds since the epoch, by the UIDs of pods that go. Those that step together have to end with the first of them."""
    going = [(pod, pod.due_at) for pod in observed.pods if pod.due_at is not None]
    tied = {revision: nodes_are_tied(observed, revision) for revision in {pod.revision for pod, _ in going}}

    def ends_with(pod: Pod, other: Pod) -> bool:
        return pod is other or (tied[pod.revision] and pod.group == other.group)

    return {pod.uid: min(due for other, due in going if ends_with(pod, other)) for pod, _ in going}
