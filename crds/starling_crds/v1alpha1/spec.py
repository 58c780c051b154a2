"""`InferenceService.spec`."""

from typing import Annotated, Any

from pydantic import Field
from starling_crds.layout import GroupLayout
from starling_crds.rules import Rule
from starling_crds.spec_layout import data_size, layout_at
from starling_crds.v1alpha1.base import ApiModel, ShapedBy
from starling_crds.v1alpha1.endpoint import EndpointSpec
from starling_crds.v1alpha1.engine import EngineSpec, KVCacheSpec
from starling_crds.v1alpha1.lifecycle import DrainSpec, RecoverySpec, RolloutSpec
from starling_crds.v1alpha1.model import ModelSpec
from starling_crds.v1alpha1.overlay import PodOverlay
from starling_crds.v1alpha1.parallelism import Accelerators, Parallelism
from starling_crds.v1alpha1.strings import ClassName, Image

_CORE_RANKS, _PER_NODE = "self.parallelism.pipeline * self.parallelism.tensor", "self.accelerators.perNode"
_DATA = (
    "(has(self.parallelism.data) ? self.parallelism.data"
    " : has(self.parallelism.expert) ? self.parallelism.expert / self.parallelism.tensor : 1)"
)
_TIERS = "has(self.kvCache.tiers) && (has(self.kvCache.tiers.cpu) || has(self.kvCache.tiers.filesystem))"


def _whole_nodes(data: str) -> str:
    return f"{data} * {_CORE_RANKS} % {_PER_NODE} == 0"


def _layout(spec: "InferenceServiceSpec", size: int | None = None) -> GroupLayout:
    """Returns the layout at a size in the unit of the spec; by default at the size of the spec."""
    split = spec.parallelism
    wanted = size or split.expert or split.data or 1
    return layout_at(split, data_size(split, wanted), spec.accelerators.per_node)


def _elastic_fills_nodes(bound: str) -> Rule:
    """Requires that a bound is a size that a group can have."""
    size = f"self.parallelism.elastic.{bound}"
    data = f"(has(self.parallelism.expert) ? {size} / self.parallelism.tensor : {size})"
    return Rule(
        field=f"parallelism.elastic.{bound}",
        cel=f"!has(self.parallelism.elastic) || {_whole_nodes(data)}",
        holds=lambda spec: spec.parallelism.elastic is None or _layout(spec, getattr(spec.parallelism.elastic, bound)).fills_nodes,
        message=(
            "must be a size whose ranks (data * pipeline * tensor) fill whole nodes of accelerators.perNode"
            f" ({{accelerators.perNode}}), got {{parallelism.elastic.{bound}}}"
        ),
    )


def _offloads(cache: KVCacheSpec) -> bool:
    return cache.tiers.cpu is not None or cache.tiers.filesystem is not None or cache.store is not None


class InferenceServiceSpec(ApiModel):
    """A model to serve, and how."""

    RULES = (
        Rule(
            field="accelerators.perNode",
            cel=f"{_CORE_RANKS} % {_PER_NODE} == 0 || {_PER_NODE} % ({_CORE_RANKS}) == 0",
            holds=lambda spec: _layout(spec).core_fits_nodes,
            message=(
                "must divide parallelism.pipeline ({parallelism.pipeline}) * parallelism.tensor ({parallelism.tensor})"
                " or be a multiple of it, got {accelerators.perNode}"
            ),
        ),
        Rule(
            field="accelerators.perNode",
            cel=_whole_nodes(_DATA),
            holds=lambda spec: _layout(spec).fills_nodes,
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
            holds=lambda spec: spec.engine.prefix_caching or not _offloads(spec.kv_cache),
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
    template: Annotated[dict[str, Any], ShapedBy(lambda: PodOverlay)] = Field(
        default_factory=dict,
        description=(
            "Strategic-merge overlay of the agents' pod template: {metadata: {labels, annotations}, spec: {...}}. The agent's"
            " container is named `agent`."
        ),
    )
    rollout: RolloutSpec = Field(default_factory=RolloutSpec, description="How a new revision replaces groups.")
    drain: DrainSpec = Field(default_factory=DrainSpec, description="What a pod does when it is terminated.")
    recovery: RecoverySpec = Field(default_factory=RecoverySpec, description="What happens when a rank dies or hangs.")
    class_name: ClassName | None = Field(
        default=None, description="Which operator serves it: one that runs with this --class. Default: the one without a class."
    )
    suspend: bool = Field(default=False, description="True removes all pods and keeps everything else.")
