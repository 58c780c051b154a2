"""Conditions as kstatus defines them, for `kubectl wait`, Helm, Flux and Argo CD. All six are always present."""

from starling_agent.contract.report import PHASES
from starling_crds.v1alpha1.status import Condition

from starling_operator.plan.observed import Pod
from starling_operator.plan.readiness import has_model_loaded, phase_text, pod_message
from starling_operator.plan.status_inputs import StatusInputs
from starling_operator.plan.timestamps import rfc3339
from starling_operator.plan.verdict import Verdict

SETTLED = ("Settled", "nothing is being reconciled")
NOT_STALLED = ("NotStalled", "nothing needs manual intervention")


def conditions(inputs: StatusInputs, verdict: Verdict) -> list[Condition]:
    """Ready, Reconciling, Stalled, Available, Progressing, ModelLoaded."""
    reconciling, stalled = verdict.state == "reconciling", verdict.state == "stalled"
    explained = (verdict.reason, verdict.message)
    made = [
        _condition("Ready", verdict.state == "ready", *explained),
        _condition("Reconciling", reconciling, *(explained if reconciling else SETTLED)),
        _condition("Stalled", stalled, *(explained if stalled else NOT_STALLED)),
        _available(inputs),
        _progressing(inputs, verdict),
        _model_loaded(inputs),
    ]
    old = {condition.type: condition for condition in inputs.service.status.conditions}
    return [_with_times(condition, old.get(condition.type), inputs) for condition in made]


def _available(inputs: StatusInputs) -> Condition:
    """True while at least one group serves, as during scaling and rollouts. Ready tells whether all wanted groups do."""
    count = len(inputs.ready)
    return _condition("Available", count > 0, "GroupsServe" if count else "NoGroupServes", f"{count} groups serve")


def _progressing(inputs: StatusInputs, verdict: Verdict) -> Condition:
    text = f"{len(inputs.ready)} of {inputs.replicas} groups ready"
    if verdict.state == "reconciling":
        why = inputs.rollout.wait_reason
        return _condition("Progressing", True, verdict.reason, f"{text}; {why}" if why else text)
    return _condition("Progressing", False, "Complete" if verdict.state == "ready" else verdict.reason, text)


def _model_loaded(inputs: StatusInputs) -> Condition:
    """True if all pods have the model in memory. The message is of the pod that is furthest behind."""
    groups = inputs.current or inputs.kept
    if not groups:
        return _condition("ModelLoaded", False, "NoGroups", "no group exists")
    behind = [pod for group in groups if not has_model_loaded(group) for pod in group.remaining_pods]
    if all(has_model_loaded(group) for group in groups):
        return _condition("ModelLoaded", True, "Loaded", f"all {sum(group.nodes for group in groups)} pods have the model loaded")
    loading = [pod for pod in behind if pod.report is not None and pod.report.phase != "failed" and not pod.waiting]
    if loading:
        pod = min(loading, key=_loading_progress)
        assert pod.report is not None
        return _condition("ModelLoaded", False, pod.report.phase.capitalize(), f"{pod.name}: {phase_text(pod.report)}")
    return _condition("ModelLoaded", False, "Waiting", pod_message(behind[0]) if behind else "its pods are still to be created")


def _loading_progress(pod: Pod) -> tuple[int, float]:
    """Returns how far a pod has come: the index of its phase, and the fraction of it that is done."""
    assert pod.report is not None
    progress = pod.report.progress
    fraction = progress.done / progress.total if progress is not None and progress.total > 0 else 0.0
    return PHASES.index(pod.report.phase), fraction


def _condition(kind: str, true: bool, reason: str, message: str) -> Condition:
    return Condition(type=kind, status="True" if true else "False", reason=reason, message=message)


def _with_times(condition: Condition, old: Condition | None, inputs: StatusInputs) -> Condition:
    same = old is not None and old.status == condition.status and old.last_transition_time
    since = old.last_transition_time if old is not None and same else rfc3339(inputs.now)
    return condition.model_copy(update={"observed_generation": inputs.service.generation, "last_transition_time": since})
