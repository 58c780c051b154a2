"""Engine arguments that fields of the spec set: each such field is marked with the argument's name.

From the marks come the arguments that `spec.engine.extraArgs` refuses, and the operator's mapping from a spec to the engine.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import ConfigDict, Field, create_model
from pydantic.fields import FieldInfo
from starling_crds.errors import model_in
from starling_crds.rules import forbidden, look_up
from starling_crds.v1alpha1.base import ApiModel, OpenModel


@dataclass(frozen=True)
class EngineArgument:
    """Marks the field that sets an engine argument.

    kind             the argument's type, where the field has another one: a quantity such as 4Gi is bytes to the engine
    unless_default   left out of an agent's configuration where the field has its default, which older images do not know
    """

    name: str
    kind: type | None = None
    unless_default: bool = False


@dataclass(frozen=True)
class TypedArgument:
    """An engine argument with a field of its own; `field` is the field's path below `spec`."""

    field: str
    kind: type
    info: FieldInfo
    unless_default: bool

    def value_in(self, spec: ApiModel) -> Any:
        """The field's value. None where it, or an object that it is in, is missing, or where older images need none."""
        value = look_up(spec, self.field)
        return None if self.unless_default and value == self.info.default else value


@cache
def typed_arguments() -> dict[str, TypedArgument]:
    """Engine arguments that a field sets, by name."""
    from starling_crds.v1alpha1.spec import InferenceServiceSpec  # its schema refuses these arguments in extraArgs

    return dict(_marked(InferenceServiceSpec, ""))


@cache
def extra_arguments_model() -> type[ApiModel]:
    """Schema of `spec.engine.extraArgs`. Kubernetes checks no names of keys: a typed argument is a property with no right value."""
    refused: dict[str, Any] = {name: _refused(typed) for name, typed in typed_arguments().items()}
    return create_model("ExtraArgs", __base__=_ExtraArguments, **refused)


class _ExtraArguments(OpenModel):
    """Engine arguments without a field of their own, by name; the engine's release knows which there are."""

    model_config = ConfigDict(alias_generator=None, protected_namespaces=())


def _refused(typed: TypedArgument) -> Any:
    refused = Annotated[typed.kind, forbidden(f"is set by spec.{typed.field}; use that")]  # type: ignore[name-defined]
    return (refused | None, Field(default=None, description=f"Not possible here: spec.{typed.field} sets it."))


def _marked(model: type[ApiModel], prefix: str) -> Iterator[tuple[str, TypedArgument]]:
    for name, info in model.model_fields.items():
        field = f"{prefix}{info.alias or name}"
        for mark in info.metadata:
            if isinstance(mark, EngineArgument):
                yield mark.name, TypedArgument(field, mark.kind or _kind(info.annotation), info, mark.unless_default)
        inner = model_in(info.annotation)
        if inner is not None and issubclass(inner, ApiModel):
            yield from _marked(inner, f"{field}.")


def _kind(annotation: Any) -> type:
    """The plain type of an annotation: str of `str | None`, int of Literal[8, 16]."""
    if isinstance(annotation, type):
        return annotation
    if get_origin(annotation) is Literal:
        return type(get_args(annotation)[0])
    return next(_kind(part) for part in get_args(annotation) if part is not NoneType)
