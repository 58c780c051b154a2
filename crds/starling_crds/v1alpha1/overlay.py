"""Fields of a pod template that `spec.template` may set or not.

Kubernetes checks most of a pod template. Named here is only what Starling sets itself, or what would certainly break a group: the
message says what to do instead.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field
from starling_crds.rules import Rule, forbidden
from starling_crds.v1alpha1.base import ApiModel, OpenModel, map_by
from starling_crds.v1alpha1.strings import LabelValue

AGENT = "agent"
OWN_PREFIX = "serving.starling.dev/"


def _not_of_agent(field: str, instead: str) -> Rule:
    return Rule(
        field=field,
        cel=f"self.name != '{AGENT}' || !has(self.{field})",
        holds=lambda container: container.name != AGENT or getattr(container, field) is None,
        message=f"cannot be set for the container {AGENT}; {instead}",
    )


def _own_names(field: str) -> Rule:
    return Rule(
        field=field,
        cel=f"!has(self.{field}) || self.{field}.all(name, !name.startsWith('{OWN_PREFIX}'))",
        holds=lambda metadata: _free_of_own(getattr(metadata, field)),
        message=f"names that begin with {OWN_PREFIX} are the operator's; use another prefix",
    )


def _free_of_own(names: Mapping[str, str] | None) -> bool:
    return not any(name.startswith(OWN_PREFIX) for name in names or ())


class OverlayMetadata(ApiModel):
    """Labels and annotations of the pods."""

    RULES = (_own_names("labels"), _own_names("annotations"))

    labels: dict[str, LabelValue] | None = Field(default=None, max_length=64, description="Further labels of the pods.")
    annotations: dict[str, str] | None = Field(default=None, max_length=64, description="Further annotations of the pods.")


class OverlayContainer(OpenModel):
    """A container of the pods. Fields of `agent` are laid over the operator's; others run beside it."""

    RULES = (
        _not_of_agent("command", "the operator runs `starling agent` there"),
        _not_of_agent("args", "the engine's settings are in spec.engine"),
        _not_of_agent("image", "use spec.image"),
    )

    name: str = Field(
        min_length=1, max_length=63, description="`agent` is the container that serves; any other name adds a container."
    )
    image: str | None = Field(default=None, max_length=1024, description="Image of a container other than `agent`.")
    command: list[str] | None = Field(default=None, max_length=256, description="Command of a container other than `agent`.")
    args: list[str] | None = Field(default=None, max_length=256, description="Arguments of a container other than `agent`.")


class OverlayPodSpec(OpenModel):
    """Spec of the pods: any field of Kubernetes; those below have rules."""

    containers: list[OverlayContainer] | None = Field(
        default=None, max_length=32, json_schema_extra=map_by("name"), description="Merged by name with the operator's."
    )
    host_network: (
        Annotated[
            bool,
            Rule(
                cel="!self",
                holds=lambda value: not value,
                message="must be false: pods of one node would all listen on ports 8000 and 8001, and no NetworkPolicy would hold",
            ),
        ]
        | None
    ) = Field(default=None, description="Not possible: agents listen on fixed ports.")
    restart_policy: Literal["Always"] | None = Field(default=None, description="Always; pods of a StatefulSet know no other.")
    hostname: Annotated[str, forbidden("is set by the StatefulSet: agents find each other by it; remove it")] | None = Field(
        default=None, description="Not possible: agents find each other by the StatefulSet's names."
    )
    subdomain: Annotated[str, forbidden("is set by the StatefulSet: agents find each other by it; remove it")] | None = Field(
        default=None, description="Not possible: agents find each other by the StatefulSet's names."
    )
    termination_grace_period_seconds: (
        Annotated[int, forbidden("follows from spec.drain (acceptSeconds and seconds); use that")] | None
    ) = Field(default=None, description="Not possible here: it follows from spec.drain.")


class PodOverlay(ApiModel):
    """The part of a pod template that is laid over the operator's."""

    metadata: OverlayMetadata | None = Field(default=None, description="Labels and annotations of the pods.")
    spec: OverlayPodSpec | None = Field(
        default=None,
        description="Any field of a pod's spec: nodeSelector, tolerations, affinity, volumes, priorityClassName, containers, ...",
    )
