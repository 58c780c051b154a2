"""`InferenceService.spec`."""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field
from starling_crds.layout import MOST_NODES, GroupLayout
from starling_crds.rules import Rule
from starling_crds.spec_layout import data_size, layout_at
from starling_crds.v1alpha1.base import ApiModel, ShapedBy
from starling_crds.v1alpha1.endpoint import EndpointSpec
from starling_crds.v1alpha1.engine import EngineSpec, KVCacheSpec
from starling_crds.v1alpha1.lifecycle import DrainSpec, RecoverySpec, RolloutSpec
from starling_crds.v1alpha1.model import ModelSpec
from starling_crds.v1alpha1.overlay import PodOverlay
from starling_crds.v1alpha1.parallelism import Accelerators, Parallelism
from starling_crds.v1alpha1.router import RouterSpec
from starling_crds.v1alpha1.scaling import ScalingSpec
from starling_crds.v1alpha1.strings import ClassName, Image

_CORE_RANKS, _PER_NODE = "self.parallelism.pipeline * self.parallelism.tensor", "self.accelerators.perNode"
_DATA = (
    "(has(self.parallelism.data) ? self.parallelism.data"
    " : has(self.parallelism.expert) ? self.parallelism.expert / self.parallelism.tensor : 1)"
)
_NODES = "pods of a group (data * pipeline * tensor / accelerators.perNode, where data is expert / tensor) are"
_GOES_TO_ZERO = "has(self.scaling) && has(self.scaling.idleSeconds)"
_HAS_POOL = "has(self.endpoint.route) && self.endpoint.route.backend == 'InferencePool'"
_HAS_CANARY = "has(self.rollout) && has(self.rollout.canary)"
_TIERS = "has(self.kvCache.tiers) && (has(self.kvCache.tiers.cpu) || has(self.kvCache.tiers.filesystem))"


def _whole_nodes(data: str) -> str:
    return f"{data} * {_CORE_RANKS} % {_PER_NODE} == 0"


def _few_nodes(data: str) -> str:
    return f"{data} * {_CORE_RANKS} <= {MOST_NODES} * {_PER_NODE}"


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


def _elastic_has_few_nodes() -> Rule:
    size = "self.parallelism.elastic.max"
    data = f"(has(self.parallelism.expert) ? {size} / self.parallelism.tensor : {size})"
    return Rule(
        field="parallelism.elastic.max",
        cel=f"!has(self.parallelism.elastic) || {_few_nodes(data)}",
        holds=lambda spec: spec.parallelism.elastic is None or _layout(spec, spec.parallelism.elastic.max).nodes <= MOST_NODES,
        message=f"{_NODES} at most {MOST_NODES}, got {{parallelism.elastic.max}}",
    )


def _needs_router(field: str, cel: str, needs: Callable[[Any], bool], message: str) -> Rule:
    """Requires routers for what `needs` says of a spec, and `cel` likewise."""
    return Rule(
        field=field,
        cel=f"!({cel}) || has(self.router)",
        holds=lambda spec: not needs(spec) or spec.router is not None,
        message=message,
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
            field="parallelism",
            cel=_few_nodes(_DATA),
            holds=lambda spec: _layout(spec).nodes <= MOST_NODES,
            message=f"{_NODES} at most {MOST_NODES}",
        ),
        _elastic_has_few_nodes(),
        Rule(
            field="kvCache",
            cel=f"self.engine.prefixCaching || !has(self.kvCache) || !(has(self.kvCache.store) || {_TIERS})",
            holds=lambda spec: spec.engine.prefix_caching or not _offloads(spec.kv_cache),
            message="needs engine.prefixCaching: what is kept is found by the prefixes of prompts",
        ),
        Rule(
            field="endpoint.tlsSecret",
            cel="!(has(self.router) && has(self.endpoint.tlsSecret))",
            holds=lambda spec: spec.router is None or spec.endpoint.tls_secret is None,
            message="is not possible with router, which serves no TLS yet; remove one of them, or end TLS at a Gateway",
        ),
        Rule(
            field="endpoint.apiKeySecret",
            cel="!(has(self.router) && has(self.router.tenantKeysSecret) && has(self.endpoint.apiKeySecret))",
            holds=lambda spec: spec.router is None or not spec.router.tenant_keys_secret or spec.endpoint.api_key_secret is None,
            message="is not possible with router.tenants, which have the API keys; remove it, or let its keys be those of a tenant",
        ),
        _needs_router(
            "endpoint.route.backend",
            _HAS_POOL,
            lambda spec: spec.has_pool,
            "must be Service without router: routers are who picks for an InferencePool",
        ),
        Rule(
            field="endpoint.route.failureMode",
            cel=(
                "!(has(self.endpoint.route) && self.endpoint.route.failureMode == 'FailOpen')"
                " || !(has(self.router) && has(self.router.tenantKeysSecret))"
            ),
            holds=lambda spec: not spec.fails_open or spec.router is None or not spec.router.tenant_keys_secret,
            message="must be FailClose with router.tenants: their keys are the routers', and agents would refuse all requests",
        ),
        _needs_router(
            "scaling.idleSeconds",
            _GOES_TO_ZERO,
            lambda spec: spec.scaling.idle_seconds is not None,
            "needs router: routers know when there are no requests, and hold those that wake the service",
        ),
        Rule(
            field="router.hold.requests",
            cel=f"!({_GOES_TO_ZERO} && has(self.router)) || self.router.hold.requests > 0",
            holds=lambda spec: spec.scaling.idle_seconds is None or spec.router is None or spec.router.hold.requests > 0,
            message="must be above 0 with scaling.idleSeconds: it is requests that wait which wake the service",
        ),
        _needs_router(
            "rollout.canary",
            _HAS_CANARY,
            lambda spec: spec.rollout.canary is not None,
            "needs router: routers share requests between two revisions, and count how each fares",
        ),
        Rule(
            field="rollout.canary",
            cel=f"!({_HAS_CANARY} && has(self.parallelism.elastic))",
            holds=lambda spec: spec.rollout.canary is None or spec.parallelism.elastic is None,
            message="is not possible with parallelism.elastic yet; remove one of them",
        ),
    )

    model: ModelSpec = Field(description="The model to serve.")
    replicas: int = Field(default=1, ge=0, le=1000, description="Groups, each with a whole copy of the model.")
    image: Image | None = Field(default=None, description="Image of the agent. Default: the operator's own release of it.")
    parallelism: Parallelism = Field(
        default_factory=Parallelism, description=f"How one group's work is split, over at most {MOST_NODES} pods."
    )
    accelerators: Accelerators = Field(default_factory=Accelerators, description="The devices of one pod.")
    engine: EngineSpec = Field(default_factory=EngineSpec, description="Memory and scheduling of the engine.")
    kv_cache: KVCacheSpec = Field(
        default_factory=KVCacheSpec, description="The KV cache: its type, and where it goes beyond the device."
    )
    endpoint: EndpointSpec = Field(default_factory=EndpointSpec, description="The OpenAI endpoint.")
    router: RouterSpec | None = Field(
        default=None, description="Routers in front of all groups; the URL stays the same. Default: connections go to any pod."
    )
    scaling: ScalingSpec = Field(default_factory=ScalingSpec, description="When there are fewer groups than replicas.")
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

    @property
    def has_pool(self) -> bool:
        """Says whether a Gateway leads to an InferencePool."""
        return self.endpoint.route is not None and self.endpoint.route.backend == "InferencePool"

    @property
    def fails_open(self) -> bool:
        """Says whether a Gateway sends requests to any agent while no router picks."""
        return self.endpoint.route is not None and self.endpoint.route.failure_mode == "FailOpen"
