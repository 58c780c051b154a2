"""Refused specs: those that contradict themselves, and those that this release cannot carry out yet."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_type_hints

from pydantic import TypeAdapter, ValidationError
from starling_crds.spec_layout import group_layout
from starling_crds.v1alpha1.spec import InferenceServiceSpec
from starling_engine.args import EngineArgs
from starling_engine.errors import ConfigError

from starling_operator.plan.config import DEVICES, engine_arguments, typed_field
from starling_operator.plan.observed import Observed
from starling_operator.plan.podtemplate import pod_template

_TERMINAL_ONLY = ("show_progress",)
"""Engine arguments that only make sense in a terminal."""


Unsupported = Callable[[InferenceServiceSpec], Iterator[str]]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Reason why a spec is not carried out. Groups that run stay as they are."""

    reason: Literal["InvalidSpec", "Unsupported"]
    message: str


def refusal(observed: Observed, unsupported: Unsupported) -> Refusal | None:
    """Returns why the spec cannot be carried out, or None. `unsupported` names what the engine cannot do of it."""
    service = observed.service
    if service.spec is None:
        return Refusal("InvalidSpec", service.spec_error or "spec: cannot be read")
    try:
        check_spec(service.spec)
        pod_template(service, service.spec, observed.settings, "")
    except ValueError as error:
        return Refusal("InvalidSpec", f"spec.{error}")
    field = next(unsupported(service.spec), None)
    return None if field is None else Refusal("Unsupported", f"spec.{field}")


def check_spec(spec: InferenceServiceSpec) -> None:
    """Raises ValueError naming the first field that can never work, and what is possible."""
    layout = group_layout(spec.parallelism, spec.accelerators.per_node)
    for name, value in spec.engine.extra_args.items():
        _check_argument(name, value)
    try:
        args = EngineArgs(model=spec.model.source, **engine_arguments(spec))
    except ConfigError as error:
        raise ValueError(in_spec(spec, error)) from None
    shares_experts = args.enable_expert_parallel and (layout.data > 1 or args.enable_eplb)
    if spec.scaling.standby == "asleep" and (shares_experts or spec.parallelism.elastic is not None):
        why = "cores that share experts, and groups that change their size, do not sleep"
        raise ValueError(f"scaling.standby: must be none here: {why}")


def not_in_this_release(spec: InferenceServiceSpec) -> Iterator[str]:
    """Yields fields that the schema has and the engine of this release cannot carry out."""
    if spec.accelerators.type not in DEVICES:
        yield f"accelerators.type: this release runs on {' and '.join(DEVICES)}, got {spec.accelerators.type}"
    if spec.model.trust_remote_code:
        yield "model.trustRemoteCode: this release runs no code of model repositories; only false is possible"


def _check_argument(name: str, value: object) -> None:
    """Raises ValueError if no such engine argument exists, a field sets it, or its type differs. The engine checks the value."""
    hints = get_type_hints(EngineArgs)
    free = sorted(known for known in hints if typed_field(known) is None and known not in _TERMINAL_ONLY)
    typed = typed_field(name)
    if typed is not None:
        raise ValueError(f"engine.extraArgs.{name}: is set by spec.{typed}; use that")
    if name not in free:
        raise ValueError(f"engine.extraArgs.{name}: the engine has no such argument; possible are {', '.join(free)}")
    try:
        TypeAdapter(hints[name]).validate_python(value, strict=True)
    except ValidationError as error:
        raise ValueError(f"engine.extraArgs.{name}: {error.errors()[0]['msg']}, got {value!r}") from None


def in_spec(spec: InferenceServiceSpec, error: ConfigError) -> str:
    """Returns the error's text with the field of the spec, in place of the engine's argument, at its beginning."""
    name = error.field
    extra = f"engine.extraArgs.{name}" if name in spec.engine.extra_args else "engine"
    return f"{(name and typed_field(name)) or extra}: {str(error).removeprefix(f'{name}: ')}"
