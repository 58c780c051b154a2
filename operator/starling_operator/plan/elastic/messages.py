"""Messages about changes of size."""

from collections.abc import Iterator

from starling_crds.v1alpha1.status import OperationStatus, Size

from starling_operator.plan.elastic.elastic_state import ElasticState, ended
from starling_operator.plan.group import Group
from starling_operator.plan.readiness import waiting_reason
from starling_operator.plan.status_inputs import StatusInputs


def operation_text(inputs: StatusInputs, operation: OperationStatus) -> str:
    """Formats an operation as EP 2 -> 4: preparing 40 %."""
    text = f"{_change(inputs, operation.source, operation.target)}: {operation.phase}"
    if not ended(operation) and operation.progress:
        text += f" {operation.progress} %"
    return f"{text}; {operation.error}" if operation.error else text


def resizing(inputs: StatusInputs) -> Iterator[tuple[Group, str]]:
    """Yields groups of the target revision whose size differs from the wanted one, with a message; and those that gave up."""
    assert inputs.desired is not None
    for group in inputs.current:
        state, step = group.elastic, inputs.elastic_steps.get(group.name)
        if state is None or step is None or not (state.effective or step.gave_up):
            continue
        operation = step.operation
        if operation is not None and not ended(operation):
            detail = step.wait_reason or (waiting_reason(group) if operation.phase == "waiting" and not operation.error else "")
            yield group, _with(operation_text(inputs, operation), detail)
        elif state.effective != inputs.desired.data:
            yield group, _with(_wanted(inputs, state), step.wait_reason or waiting_reason(group))
        elif step.nodes != group.nodes or group.nodes > group.gang_size:
            yield group, _with(_wanted(inputs, state), "pods that no size needs go")


def first_size(inputs: StatusInputs, group: Group) -> str:
    """Returns a message about an elastic group without any size yet; "" for all others."""
    step = inputs.elastic_steps.get(group.name)
    if step is None or group.elastic is None or group.elastic.effective:
        return ""
    if step.operation is None or ended(step.operation):
        return step.wait_reason
    return operation_text(inputs, step.operation)


def _wanted(inputs: StatusInputs, state: ElasticState) -> str:
    assert inputs.desired is not None
    return _change(inputs, state.size(state.effective), state.size(inputs.desired.data))


def _change(inputs: StatusInputs, source: Size, target: Size) -> str:
    unit = inputs.desired.unit if inputs.desired is not None else "data"
    short = "EP" if unit == "expert" else "DP"
    return f"{short} {getattr(source, unit)} -> {getattr(target, unit)}"


def _with(text: str, detail: str) -> str:
    return f"{text}; {detail}" if detail else text
