"""`ParallelismScale`: the size of an elastic service's groups, as an object of its own: `InferenceService` scales their number."""

from pydantic import Field
from starling_crds.v1alpha1.base import ApiModel, map_by
from starling_crds.v1alpha1.status import Condition


class ParallelismScaleSpec(ApiModel):
    """The wanted size."""

    replicas: int = Field(
        ge=1,
        le=4096,
        description=(
            "Size that each group of the service is to have, in the unit of its spec.parallelism: expert parallel ranks where that"
            " gives expert, else data parallel ranks. A size that no group can have is rounded up to the next that one can have,"
            " within spec.parallelism.elastic; the condition Rounded says so."
        ),
    )


class ParallelismScaleStatus(ApiModel):
    """State that the operator saw last."""

    observed_generation: int = Field(default=0, description="Generation that the operator acted on.")
    replicas: int = Field(default=0, description="Size that all groups serve at, in the same unit; the smallest where they differ.")
    selector: str = Field(default="", description="Label selector of the service's pods, for autoscalers.")
    unit: str = Field(default="", description="expert or data.")
    target: int = Field(default=0, description="Size that the groups go to: spec.replicas, rounded.")
    conditions: list[Condition] = Field(
        default_factory=list,
        json_schema_extra=map_by("type"),
        description="Ready: all groups serve at the target. Rounded: the target is another size than spec.replicas.",
    )
