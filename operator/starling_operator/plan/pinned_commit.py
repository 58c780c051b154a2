"""Weights of a revision: a name of the hub is pinned to one commit, and pods with other weights are not ready.

Only pods have the token for the hub. Each agent reports the commit that the name means to it. The first one is written to a
ConfigMap that never changes, and every pod of the revision loads that commit, whenever it starts.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from starling_agent.contract.config import is_pinned

from starling_operator.plan import names
from starling_operator.plan.config import PIN_KEY
from starling_operator.plan.group import Group
from starling_operator.plan.labels import child
from starling_operator.plan.observed import Manifest, Observed, Pod, Service
from starling_operator.plan.revision import Revision

_COMMIT = re.compile(r"[0-9a-f]{40}")


def pinned_commit(service: str, revision: str, children: Mapping[tuple[str, str], Manifest]) -> str | None:
    """Returns the commit that a revision is pinned to; None while it is not."""
    written = children.get(("ConfigMap", names.pin(service, revision)))
    return None if written is None else (written.get("data") or {}).get(PIN_KEY)


def commit_of(observed: Observed, revision: Revision) -> str | None:
    """Returns the commit that all pods of a revision have to serve; None while it is unknown, or without a hub."""
    if is_pinned(revision.source):
        return revision.source.partition("@")[2]
    return pinned_commit(observed.service.name, revision.id, observed.children)


def new_pinned_commit(observed: Observed, revision: Revision) -> tuple[Manifest, ...]:
    """Returns the ConfigMap to create now. The commit of a pod with weights in memory comes before that of others."""
    if not revision.awaits_pinned_commit or pinned_commit(observed.service.name, revision.id, observed.children) is not None:
        return ()
    reported = [(pod, commit) for pod in observed.pods if (commit := _reported_commit(pod, revision)) is not None]
    if not reported:
        return ()
    _, commit = min(reported, key=lambda each: (each[0].report is None or each[0].report.weights is None, each[0].name))
    return (_manifest(observed.service, revision, commit),)


def common_weights(groups: Iterable[Group]) -> str | None:
    """Returns the digest of weights that most pods report; of two, the first group's. None without a report."""
    found = [pod.report.weights for group in groups for pod in group.needed_pods if pod.report is not None and pod.report.weights]
    return Counter(found).most_common(1)[0][0] if found else None


def _reported_commit(pod: Pod, revision: Revision) -> str | None:
    report = pod.report
    if report is None or pod.revision != revision.id or report.revision != revision.id:
        return None
    return report.commit if report.commit is not None and _COMMIT.fullmatch(report.commit) else None


def _manifest(service: Service, revision: Revision, commit: str) -> Manifest:
    made = child(service, "v1", "ConfigMap", names.pin(service.name, revision.id), revision=revision.id)
    return made | {"immutable": True, "data": {PIN_KEY: commit}}
