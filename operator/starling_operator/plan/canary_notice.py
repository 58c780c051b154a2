"""Tells routers of a canary, by the status: an operator that starts tells them the same."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from starling_agent.contract.router_report import CanaryNotice
from starling_crds.v1alpha1.lifecycle import CanarySpec, CanaryStep
from starling_crds.v1alpha1.status import CanaryStatus

from starling_operator.plan import labels, names
from starling_operator.plan.decision import Delete, deletion
from starling_operator.plan.labels import child
from starling_operator.plan.observed import Manifest, Observed
from starling_operator.plan.pinned_commit import commit_of
from starling_operator.plan.revision import Revision, stored_revisions

CANARY_FILE = "canary.json"
_NUMBERS = ("dtype", "quantization", "kv_cache_dtype")
"""Engine arguments without which two revisions of one model are not expected to answer the same."""
_DEFAULT = CanarySpec(steps=[CanaryStep(weight=1)])
"""Stands for what a spec that is refused, or edited meanwhile, no longer says."""


def canary_notice(observed: Observed, status: CanaryStatus | None) -> CanaryNotice | None:
    """Returns None without a canary. While groups are left of one that was rolled or taken back, no requests go there."""
    if status is None or status.phase == "passed":
        return None
    if status.phase != "trying" and not is_left(observed, status.revision):
        return None
    spec = observed.service.spec
    wanted = (spec.rollout.canary if spec is not None else None) or _DEFAULT
    stored = {revision.id: revision for revision in stored_revisions(observed)}
    stable, tried = stored.get(status.stable), stored.get(status.revision)
    # Before both are stored, nothing goes to the canary anyway.
    tokens, exact = False, False
    if stable is not None and tried is not None:
        tokens = compares_tokens(observed, wanted, stable, tried)
        exact = _engine(stable).get("dtype") == _engine(tried).get("dtype") == "float32"
    return CanaryNotice(
        stable=status.stable,
        canary=status.revision,
        attempt=attempt_of(status),
        weight=status.weight,
        sticky_by=wanted.sticky_by,
        compare="tokens" if tokens else "slo",
        exact=exact,
    )


def stored_notice(observed: Observed, notice: CanaryNotice | None) -> tuple[Manifest, ...]:
    """Returns the ConfigMap with what routers are told: one that starts while no operator runs finds it there."""
    if notice is None:
        return ()
    made = child(observed.service, "v1", "ConfigMap", names.router(observed.service.name))
    return (made | {"data": {CANARY_FILE: notice.model_dump_json()}},)


def is_notice(manifest: Manifest) -> bool:
    """Says whether an object has what routers are told. They are told without it, too: its refusal is no trouble of the service."""
    return manifest["kind"] == "ConfigMap" and CANARY_FILE in manifest["data"]


def notice_deletion(observed: Observed, notice: CanaryNotice | None) -> Iterator[Delete]:
    if notice is None:
        yield from deletion(observed, "ConfigMap", names.router(observed.service.name), "no canary runs")


def attempt_of(status: CanaryStatus) -> str:
    """Returns an id of its step in this try. Routers count anew for each: what was there before hides nothing and dooms nothing."""
    return status.since


def compares_tokens(observed: Observed, spec: CanarySpec, stable: Revision, tried: Revision) -> bool:
    """Says whether other tokens count. By default they do where the model and the types of its numbers are the same."""
    if spec.compare is not None:
        return spec.compare == "tokens"
    if any(_engine(stable).get(name) != _engine(tried).get(name) for name in _NUMBERS):
        return False
    return stable.source == tried.source and _have_same_files(observed, stable, tried)


def _have_same_files(observed: Observed, stable: Revision, tried: Revision) -> bool:
    """Compares what pods of two revisions of one source serve. Without a commit, pods of both have to say it."""
    commit, weights = commit_of(observed, stable), (_weights(observed, stable.id), _weights(observed, tried.id))
    return commit == commit_of(observed, tried) and len(set.union(*weights)) <= 1 and (commit is not None or all(weights))


def _engine(revision: Revision) -> Mapping[str, Any]:
    """Engine arguments in agent.json."""
    return dict(json.loads(revision.config)["engine"])


def _weights(observed: Observed, revision: str) -> set[str]:
    """Digests of files that pods of a revision report: a folder or a claim may hold others than it did."""
    found = (pod.report.weights for pod in observed.pods if pod.revision == revision and pod.report is not None)
    return {weights for weights in found if weights}


def is_left(observed: Observed, revision: str) -> bool:
    """Says whether a revision has a group, or a pod that drains."""
    sets = (live for (kind, _), live in observed.children.items() if kind == "StatefulSet")
    labelled = ((live["metadata"].get("labels") or {}).get(labels.REVISION) for live in sets)
    return revision in labelled or any(pod.revision == revision for pod in observed.pods)
