"""`spec.rollout`, `spec.drain`, `spec.recovery`: rollouts, drains and recovery."""

from typing import Annotated

from pydantic import Field
from starling_crds.rules import Rule
from starling_crds.v1alpha1.base import ApiModel
from starling_crds.v1alpha1.engine_arguments import EngineArgument


class RolloutSpec(ApiModel):
    """A new revision replaces whole groups."""

    RULES = (
        Rule(
            field="maxSurge",
            cel="self.maxSurge > 0 || self.maxUnavailable > 0",
            holds=lambda rollout: rollout.max_surge > 0 or rollout.max_unavailable > 0,
            message="maxSurge and maxUnavailable must not both be 0, or no group could ever be replaced",
        ),
    )

    max_unavailable: int = Field(default=0, ge=0, le=1024, description="Groups that may be missing during a rollout.")
    max_surge: int = Field(default=1, ge=0, le=1024, description="Groups above spec.replicas during a rollout.")
    progress_deadline_seconds: int = Field(
        default=600,
        ge=10,
        le=604_800,
        description="A group without progress for so long makes the service Stalled; it may still become ready.",
    )


class DrainSpec(ApiModel):
    """End of a pod."""

    accept_seconds: int = Field(
        default=5, ge=0, le=300, description="Still accepts requests so long, for load balancers lag behind."
    )
    seconds: int = Field(default=120, ge=0, le=86_400, description="After that, open requests may take so long to finish.")


class RecoverySpec(ApiModel):
    """Recovery when a rank dies or makes no progress."""

    restart_budget: int = Field(
        default=5, ge=0, le=1000, description="Restarts of a group's pods within windowSeconds before it counts as failed."
    )
    window_seconds: int = Field(default=3600, ge=60, le=604_800, description="Window in which restarts are counted.")
    progress_timeout_seconds: Annotated[int, EngineArgument("progress_timeout", kind=float)] = Field(
        default=20, ge=1, le=3600, description="Work waiting and no step for so long counts as hung."
    )
