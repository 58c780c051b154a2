"""What `spec.template` and `spec.engine.extraArgs` may hold. Both stay plain dictionaries; their shape is checked beside them.

Most of a pod template is Kubernetes' own to check. Named here is only what Starling sets itself, or what would break a group for
certain: whoever tries it reads what to do in place of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, GetJsonSchemaHandler, create_model
from pydantic_core import CoreSchema
from starling_crds.rules import Rule, never
from starling_crds.v1alpha1.base import ApiModel, map_by
from starling_crds.v1alpha1.strings import LabelValue

AGENT = "agent"
OWN_PREFIX = "serving.starling.dev/"

TYPED_ARGUMENTS: dict[str, tuple[type, str]] = {
    "model": (str, "model.source"),
    "revision": (str, "model.source"),
    "dtype": (str, "model.dtype"),
    "max_model_len": (int, "model.maxLength"),
    "device": (str, "accelerators.type"),
    "tensor_parallel_size": (int, "parallelism.tensor"),
    "pipeline_parallel_size": (int, "parallelism.pipeline"),
    "data_parallel_size": (int, "parallelism.data"),
    "kv_cache_memory_bytes": (int, "engine.kvMemory"),
    "gpu_memory_utilization": (float, "engine.memoryFraction"),
    "block_size": (int, "engine.blockSize"),
    "max_num_batched_tokens": (int, "engine.maxBatchedTokens"),
    "step_target_ms": (int, "engine.stepTargetMilliseconds"),
    "max_num_seqs": (int, "engine.maxSequences"),
    "max_num_waiting": (int, "engine.maxWaiting"),
    "enable_prefix_caching": (bool, "engine.prefixCaching"),
    "scheduling_policy": (str, "engine.schedulingPolicy"),
    "kv_cache_dtype": (str, "kvCache.dtype"),
    "kv_cpu_bytes": (int, "kvCache.tiers.cpu.bytes"),
    "kv_fs_path": (str, "kvCache.tiers.filesystem.path"),
    "kv_fs_bytes": (int, "kvCache.tiers.filesystem.bytes"),
    "kv_store": (str, "kvCache.store"),
    "progress_timeout": (float, "recovery.progressTimeoutSeconds"),
}
"""Engine arguments that have a field: their type, and where in the spec the field is."""


@dataclass(frozen=True)
class ShapedBy:
    """The dictionary has the schema of `model`, and `problems` checks it; its nulls, which delete keys, are kept."""

    model: type[ApiModel]

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        del schema
        return handler(self.model.__pydantic_core_schema__)


class OpenModel(ApiModel):
    """Holds further fields that are not ours to know."""

    model_config = ConfigDict(extra="allow")


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
    """Of the pods' spec: any field of Kubernetes, but for those below."""

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
    hostname: Annotated[str, never("is set by the StatefulSet: agents find each other by it; remove it")] | None = Field(
        default=None, description="Not possible: agents find each other by the StatefulSet's names."
    )
    subdomain: Annotated[str, never("is set by the StatefulSet: agents find each other by it; remove it")] | None = Field(
        default=None, description="Not possible: agents find each other by the StatefulSet's names."
    )
    termination_grace_period_seconds: (
        Annotated[int, never("follows from spec.drain (acceptSeconds and seconds); use that")] | None
    ) = Field(default=None, description="Not possible here: it follows from spec.drain.")


class PodOverlay(ApiModel):
    """The part of a pod template that is laid over the operator's."""

    metadata: OverlayMetadata | None = Field(default=None, description="Labels and annotations of the pods.")
    spec: OverlayPodSpec | None = Field(
        default=None,
        description="Any field of a pod's spec: nodeSelector, tolerations, affinity, volumes, priorityClassName, containers, ...",
    )


class _Arguments(OpenModel):
    """Engine arguments without a field of their own, by name. Which ones there are, the engine's release knows."""

    model_config = ConfigDict(alias_generator=None, protected_namespaces=())


def _refused_argument(kind: type, field: str) -> Any:
    refused = Annotated[kind, never(f"is set by spec.{field}; use that")]  # type: ignore[valid-type]
    return (refused | None, Field(default=None, description=f"Not possible here: spec.{field} sets it."))


ExtraArgs: type[ApiModel] = create_model(
    "ExtraArgs",
    __base__=_Arguments,
    **{name: _refused_argument(kind, field) for name, (kind, field) in TYPED_ARGUMENTS.items()},
)
"""As Kubernetes checks no names of keys, each argument that has a field is a property that is never right."""
