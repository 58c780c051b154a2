"""Which weights a revision has: a name of the hub is made one commit, once, and what is loaded is compared.

Only pods have the token to ask the hub. Each agent says what the name means to it; the first answer is written down in a ConfigMap
that never changes, and every pod of the revision loads that commit, however late it starts.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from starling_agent.contract.config import is_pinned

from starling_operator.plan import names
from starling_operator.plan.config import PIN_KEY
from starling_operator.plan.group import Group
from starling_operator.plan.manifest import child
from starling_operator.plan.observed import Manifest, Observed, Pod, Service
from starling_operator.plan.revision import Revision

_COMMIT = re.compile(r"[0-9a-f]{40}")


def pin_of(service: str, revision: str, children: Mapping[tuple[str, str], Manifest]) -> str | None:
    """The commit that is written down for a revision; None while there is none."""
    written = children.get(("ConfigMap", names.pin(service, revision)))
    return None if written is None else (written.get("data") or {}).get(PIN_KEY)


def commit_of(observed: Observed, revision: Revision) -> str | None:
    """The commit that all pods of a revision have to serve; None where nobody can tell, or nothing comes from a hub."""
    if is_pinned(revision.source):
        return revision.source.partition("@")[2]
    return pin_of(observed.service.name, revision.id, observed.children)


def new_pin(observed: Observed, revision: Revision) -> tuple[Manifest, ...]:
    """What is to be written down now: who serves already comes before who has only asked."""
    if not revision.awaits_pin or pin_of(observed.service.name, revision.id, observed.children) is not None:
        return ()
    told = [(pod, commit) for pod in observed.pods if (commit := _told(pod, revision)) is not None]
    if not told:
        return ()
    _, commit = min(told, key=lambda each: (each[0].report is None or each[0].report.weights is None, each[0].name))
    return (_manifest(observed.service, revision, commit),)


def common_weights(groups: Iterable[Group]) -> str | None:
    """The digest that most pods report; of two, the first group's. None while there is no report."""
    found = [pod.report.weights for group in groups for pod in group.serving if pod.report is not None and pod.report.weights]
    return Counter(found).most_common(1)[0][0] if found else None


def _told(pod: Pod, revision: Revision) -> str | None:
    report = pod.report
    if report is None or pod.revision != revision.id or report.revision != revision.id:
        return None
    return report.commit if report.commit is not None and _COMMIT.fullmatch(report.commit) else None


def _manifest(service: Service, revision: Revision, commit: str) -> Manifest:
    made = child(service, "v1", "ConfigMap", names.pin(service.name, revision.id), revision=revision.id)
    return made | {"immutable": True, "data": {PIN_KEY: commit}}
