"""Conditions by kstatus, so that `kubectl wait`, Helm, Flux and Argo CD judge right: all six are always there."""

from starling_agent.contract.report import PHASES
from starling_crds.v1alpha1.status import Condition

from starling_operator.plan.clock import rfc3339
from starling_operator.plan.observed import Pod
from starling_operator.plan.proof import loaded, phase_text, pod_message
from starling_operator.plan.status_inputs import StatusInputs
from starling_operator.plan.verdict import Verdict

SETTLED = ("Settled", "nothing is on the way")
NOT_STALLED = ("NotStalled", "nothing waits for somebody to mend it")


def conditions(situation: StatusInputs, judged: Verdict) -> list[Condition]:
    """Ready, Reconciling, Stalled, Available, Progressing, ModelLoaded."""
    moving, stalled = judged.state == "moving", judged.state == "stalled"
    made = [
        _condition("Ready", judged.state == "ready", judged.reason, judged.message),
        _condition("Reconciling", True, judged.reason, judged.message) if moving else _condition("Reconciling", False, *SETTLED),
        _condition("Stalled", True, judged.reason, judged.message) if stalled else _condition("Stalled", False, *NOT_STALLED),
        _available(situation),
        _progressing(situation, judged),
        _model_loaded(situation),
    ]
    old = {condition.type: condition for condition in situation.service.status.conditions}
    return [_dated(condition, old.get(condition.type), situation) for condition in made]


def _available(situation: StatusInputs) -> Condition:
    """Somebody answers. How many should is Ready's to tell: while scaling or rolling, clients are served all the same."""
    count = len(situation.ready)
    return _condition("Available", count > 0, "GroupsServe" if count else "NoGroupServes", f"{count} groups serve")


def _progressing(situation: StatusInputs, judged: Verdict) -> Condition:
    text = f"{len(situation.ready)} of {situation.replicas} groups ready"
    if judged.state == "moving":
        waits = situation.change.waits
        return _condition("Progressing", True, judged.reason, f"{text}; {waits}" if waits else text)
    return _condition("Progressing", False, "Complete" if judged.state == "ready" else judged.reason, text)


def _model_loaded(situation: StatusInputs) -> Condition:
    """The message is of the pod that is furthest behind."""
    groups = situation.current or situation.kept
    if not groups:
        return _condition("ModelLoaded", False, "NoGroups", "no group exists")
    behind = [pod for group in groups if not loaded(group) for pod in group.live]
    if all(loaded(group) for group in groups):
        return _condition("ModelLoaded", True, "Loaded", f"all {sum(group.nodes for group in groups)} pods have the model loaded")
    loading = [pod for pod in behind if pod.report is not None and pod.report.phase != "failed" and not pod.waiting]
    if loading:
        pod = min(loading, key=_distance)
        assert pod.report is not None
        return _condition("ModelLoaded", False, pod.report.phase.capitalize(), f"{pod.name}: {phase_text(pod.report)}")
    return _condition("ModelLoaded", False, "Waiting", pod_message(behind[0]) if behind else "its pods are still to be made")


def _distance(pod: Pod) -> tuple[int, float]:
    """How far a pod has come: its phase, and its share of that."""
    assert pod.report is not None
    progress = pod.report.progress
    share = progress.done / progress.total if progress is not None and progress.total > 0 else 0.0
    return PHASES.index(pod.report.phase), share


def _condition(kind: str, true: bool, reason: str, message: str) -> Condition:
    return Condition(type=kind, status="True" if true else "False", reason=reason, message=message)


def _dated(condition: Condition, old: Condition | None, situation: StatusInputs) -> Condition:
    same = old is not None and old.status == condition.status and old.last_transition_time
    since = old.last_transition_time if old is not None and same else rfc3339(situation.now)
    return condition.model_copy(update={"observed_generation": situation.service.generation, "last_transition_time": since})
