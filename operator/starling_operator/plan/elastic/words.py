"""Changes of size in words."""

from collections.abc import Iterator

from starling_crds.v1alpha1.status import OperationStatus, Size

from starling_operator.plan.elastic.elastic_state import ElasticState, ended
from starling_operator.plan.group import Group
from starling_operator.plan.proof import waits_for
from starling_operator.plan.status_inputs import StatusInputs


def operation_text(situation: StatusInputs, operation: OperationStatus) -> str:
    """EP 2 -> 4: preparing 40 %."""
    text = f"{_change(situation, operation.source, operation.target)}: {operation.phase}"
    if not ended(operation) and operation.progress:
        text += f" {operation.progress} %"
    return f"{text}; {operation.error}" if operation.error else text


def resizing(situation: StatusInputs) -> Iterator[tuple[Group, str]]:
    """Groups of the target revision that have a size, but not as they should, and how far each is; and those that get none."""
    assert situation.desired is not None
    for group in situation.current:
        sizing, step = group.sizing, situation.steps.get(group.name)
        if sizing is None or step is None or not (sizing.effective or step.gave_up):
            continue
        operation = step.operation
        if operation is not None and not ended(operation):
            detail = step.waits or (waits_for(group) if operation.phase == "waiting" and not operation.error else "")
            yield group, _with(operation_text(situation, operation), detail)
        elif sizing.effective != situation.desired.data:
            yield group, _with(_wanted(situation, sizing), step.waits or waits_for(group))
        elif step.nodes != group.nodes or group.nodes > group.gang:
            yield group, _with(_wanted(situation, sizing), "pods that no size needs go")


def first_size(situation: StatusInputs, group: Group) -> str:
    """How far a group without any size is, in an elastic service; "" for all others."""
    step = situation.steps.get(group.name)
    if step is None or group.sizing is None or group.sizing.effective:
        return ""
    if step.operation is None or ended(step.operation):
        return step.waits
    return operation_text(situation, step.operation)


def _wanted(situation: StatusInputs, sizing: ElasticState) -> str:
    assert situation.desired is not None
    return _change(situation, sizing.size(sizing.effective), sizing.size(situation.desired.data))


def _change(situation: StatusInputs, source: Size, target: Size) -> str:
    unit = situation.desired.unit if situation.desired is not None else "data"
    short = "EP" if unit == "expert" else "DP"
    return f"{short} {getattr(source, unit)} -> {getattr(target, unit)}"


def _with(text: str, detail: str) -> str:
    return f"{text}; {detail}" if detail else text
