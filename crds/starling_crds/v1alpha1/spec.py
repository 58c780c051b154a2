"""`InferenceService.spec`."""

from typing import Annotated, Any

from pydantic import Field
from starling_crds.rules import Rule
from starling_crds.v1alpha1.base import ApiModel
from starling_crds.v1alpha1.endpoint import EndpointSpec
from starling_crds.v1alpha1.engine import EngineSpec, KVCacheSpec
from starling_crds.v1alpha1.lifecycle import DrainSpec, RecoverySpec, RolloutSpec
from starling_crds.v1alpha1.model import ModelSpec
from starling_crds.v1alpha1.overlay import PodOverlay, ShapedBy
from starling_crds.v1alpha1.parallelism import Accelerators, Parallelism
from starling_crds.v1alpha1.strings import ClassName, Image

_TENSOR, _PER_NODE = "self.parallelism.tensor", "self.accelerators.perNode"
_DATA = (
    "(has(self.parallelism.data) ? self.parallelism.data"
    " : has(self.parallelism.expert) ? self.parallelism.expert / self.parallelism.tensor : 1)"
)
_TIERS = "has(self.kvCache.tiers) && (has(self.kvCache.tiers.cpu) || has(self.kvCache.tiers.filesystem))"


def _whole_nodes(data: str) -> str:
    return f"{data} * self.parallelism.pipeline * {_TENSOR} % {_PER_NODE} == 0"


def _one_divides_the_other(one: int, other: int) -> bool:
    return one % other == 0 or other % one == 0


def _data_size(split: Parallelism) -> int:
    if split.expert is not None:
        return split.expert // split.tensor
    return split.data or 1


def _fills_nodes(spec: "InferenceServiceSpec", data: int) -> bool:
    return data * spec.parallelism.pipeline * spec.parallelism.tensor % spec.accelerators.per_node == 0


def _elastic_fills_nodes(bound: str) -> Rule:
    """Both ends have to be sizes that a group can have."""
    size = f"self.parallelism.elastic.{bound}"
    data = f"(has(self.parallelism.expert) ? {size} / self.parallelism.tensor : {size})"
    return Rule(
        field=f"parallelism.elastic.{bound}",
        cel=f"!has(self.parallelism.elastic) || {_whole_nodes(data)}",
        holds=lambda spec: spec.parallelism.elastic is None or _fills_nodes(spec, _elastic_data(spec.parallelism, bound)),
        message=(
            "must be a size whose ranks (data * pipeline * tensor) fill whole nodes of accelerators.perNode"
            f" ({{accelerators.perNode}}), got {{parallelism.elastic.{bound}}}"
        ),
    )


def _keeps(cache: KVCacheSpec) -> bool:
    return cache.tiers.cpu is not None or cache.tiers.filesystem is not None or cache.store is not None


def _elastic_data(split: Parallelism, bound: str) -> int:
    size: int = getattr(split.elastic, bound)
    return size // split.tensor if split.expert is not None else size


class InferenceServiceSpec(ApiModel):
    """A model to serve, and how."""

    RULES = (
        Rule(
            field="accelerators.perNode",
            cel=f"{_TENSOR} % {_PER_NODE} == 0 || {_PER_NODE} % {_TENSOR} == 0",
            holds=lambda spec: _one_divides_the_other(spec.parallelism.tensor, spec.accelerators.per_node),
            message="must divide parallelism.tensor ({parallelism.tensor}) or be a multiple of it, got {accelerators.perNode}",
        ),
        Rule(
            field="accelerators.perNode",
            cel=_whole_nodes(_DATA),
            holds=lambda spec: _fills_nodes(spec, _data_size(spec.parallelism)),
            message=(
                "must divide the ranks of a group (data * pipeline * tensor, where data is expert / tensor),"
                " so that nodes are whole, got {accelerators.perNode}"
            ),
        ),
        _elastic_fills_nodes("min"),
        _elastic_fills_nodes("max"),
        Rule(
            field="kvCache",
            cel=f"self.engine.prefixCaching || !has(self.kvCache) || !(has(self.kvCache.store) || {_TIERS})",
            holds=lambda spec: spec.engine.prefix_caching or not _keeps(spec.kv_cache),
            message="needs engine.prefixCaching: what is kept is found by the prefixes of prompts",
        ),
    )

    model: ModelSpec = Field(description="The model to serve.")
    replicas: int = Field(default=1, ge=0, le=1000, description="Groups, each with a whole copy of the model.")
    image: Image | None = Field(default=None, description="Image of the agent. Default: the operator's own release of it.")
    parallelism: Parallelism = Field(default_factory=Parallelism, description="How one group's work is split.")
    accelerators: Accelerators = Field(default_factory=Accelerators, description="The devices of one pod.")
    engine: EngineSpec = Field(default_factory=EngineSpec, description="Memory and scheduling of the engine.")
    kv_cache: KVCacheSpec = Field(
        default_factory=KVCacheSpec, description="The KV cache: its type, and where it goes beyond the device."
    )
    endpoint: EndpointSpec = Field(default_factory=EndpointSpec, description="The OpenAI endpoint.")
    template: Annotated[dict[str, Any], ShapedBy(PodOverlay)] = Field(
        default_factory=dict,
        description=(
            "Strategic-merge overlay of the agents' pod template: {metadata: {labels, annotations}, spec: {...}}. The agent's"
            " container is named `agent`."
        ),
    )
    rollout: RolloutSpec = Field(default_factory=RolloutSpec, description="How a new revision replaces groups.")
    drain: DrainSpec = Field(default_factory=DrainSpec, description="What a pod does when it is told to go.")
    recovery: RecoverySpec = Field(default_factory=RecoverySpec, description="What happens when a rank dies or hangs.")
    class_name: ClassName | None = Field(
        default=None, description="Which operator serves it: one that runs with this --class. Default: the one without a class."
    )
    suspend: bool = Field(default=False, description="True removes all pods and keeps everything else.")
