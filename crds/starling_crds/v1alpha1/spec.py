"""`InferenceService.spec`."""

from typing import Any

from pydantic import Field
from starling_crds.v1alpha1.base import ApiModel
from starling_crds.v1alpha1.endpoint import EndpointSpec
from starling_crds.v1alpha1.engine import EngineSpec, KVCacheSpec
from starling_crds.v1alpha1.lifecycle import DrainSpec, RecoverySpec, RolloutSpec
from starling_crds.v1alpha1.model import ModelSpec
from starling_crds.v1alpha1.parallelism import Accelerators, Parallelism


class InferenceServiceSpec(ApiModel):
    """A model to serve, and how."""

    model: ModelSpec = Field(description="The model to serve.")
    replicas: int = Field(default=1, ge=0, le=1000, description="Groups, each with a whole copy of the model.")
    image: str | None = Field(
        default=None, min_length=1, max_length=1024, description="Image of the agent. Default: the operator's own release of it."
    )
    parallelism: Parallelism = Field(default_factory=Parallelism, description="How one group's work is split.")
    accelerators: Accelerators = Field(default_factory=Accelerators, description="The devices of one pod.")
    engine: EngineSpec = Field(default_factory=EngineSpec, description="Memory and scheduling of the engine.")
    kv_cache: KVCacheSpec = Field(default_factory=KVCacheSpec, description="The KV cache beyond the device.")
    endpoint: EndpointSpec = Field(default_factory=EndpointSpec, description="The OpenAI endpoint.")
    template: dict[str, Any] = Field(
        default_factory=dict,
        description=(
            "Strategic-merge overlay of the agents' pod template: {metadata: {labels, annotations}, spec: {...}}. The agent's"
            " container is named `agent`."
        ),
    )
    rollout: RolloutSpec = Field(default_factory=RolloutSpec, description="How a new revision replaces groups.")
    drain: DrainSpec = Field(default_factory=DrainSpec, description="What a pod does when it is told to go.")
    recovery: RecoverySpec = Field(default_factory=RecoverySpec, description="What happens when a rank dies or hangs.")
    suspend: bool = Field(default=False, description="True removes all pods and keeps everything else.")
