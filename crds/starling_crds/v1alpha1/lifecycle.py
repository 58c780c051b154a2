"""`spec.rollout`, `spec.drain`, `spec.recovery`: rollouts, drains and recovery."""

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field
from starling_crds.rules import Rule
from starling_crds.v1alpha1.base import ApiModel
from starling_crds.v1alpha1.engine_arguments import EngineArgument


class CanaryStep(ApiModel):
    """A part of the requests that a new revision gets for some time. Counts are of the step, summed over routers."""

    weight: int = Field(ge=1, le=99, description="Percent of the requests that go to the new revision.")
    seconds: int = Field(
        default=600, ge=1, le=2_592_000, description="The next step comes after so long, if this one's gates hold by then."
    )
    max_error_percent: float = Field(
        default=1.0, ge=0, le=100, description="By so much the percentage of requests that fail may be above the old revision's."
    )
    max_first_token_ratio: float = Field(
        default=3.0,
        ge=2,
        le=1000,
        description="The median time to a first token may be so many times the old revision's. It is known to a factor of 2.",
    )


class CanarySpec(ApiModel):
    """A new revision is tried on a part of the requests before it replaces the old one, and is rolled back if it is worse."""

    RULES = (
        Rule(
            field="steps",
            cel=(
                "self.steps.map(step, step.weight).isSorted()"
                " && self.steps.all(step, self.steps.exists_one(other, other.weight == step.weight))"
            ),
            holds=lambda canary: all(low.weight < high.weight for low, high in pairwise(canary.steps)),
            message="must have weights that rise from step to step",
        ),
    )

    steps: list[CanaryStep] = Field(
        min_length=1,
        max_length=20,
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
        description="Steps, one after the other. After the last one the rollout goes on as without a canary.",
    )
    sticky_by: Literal["key", "session", "none"] = Field(
        default="session",
        description=(
            "Who stays with one revision: a tenant or API key, a session, or nobody. Requests of nobody are shared one by one."
            " With few keys the canary's part may be far from its weight, and none or all with one."
        ),
    )
    compare: Literal["tokens", "slo"] | None = Field(
        default=None,
        description=(
            "tokens: both revisions answer some requests, and other tokens roll it back; slo: errors and times alone count."
            " Default: tokens where model, dtype and quantization are the same in both, else slo."
        ),
    )


class RolloutSpec(ApiModel):
    """A new revision replaces whole groups."""

    RULES = (
        Rule(
            field="pause",
            cel="!self.pause || has(self.canary)",
            holds=lambda rollout: not rollout.pause or rollout.canary is not None,
            message="needs rollout.canary, which it holds at its step; to stop another rollout apply the spec as it was",
        ),
        Rule(
            field="maxSurge",
            cel="self.maxSurge > 0 || self.maxUnavailable > 0",
            holds=lambda rollout: rollout.max_surge > 0 or rollout.max_unavailable > 0,
            message="maxSurge and maxUnavailable must not both be 0, or no group could ever be replaced",
        ),
    )

    max_unavailable: int = Field(default=0, ge=0, le=1024, description="Groups that may be missing during a rollout.")
    max_surge: int = Field(
        default=1, ge=0, le=1024, description="Groups above spec.replicas during a rollout. Those of a canary come on top."
    )
    canary: CanarySpec | None = Field(
        default=None, description="Steps by which a new revision gets requests first. Default: it replaces the old one at once."
    )
    pause: bool = Field(default=False, description="True holds a canary at its step. Its gates still count.")
    progress_deadline_seconds: int = Field(
        default=600,
        ge=10,
        le=604_800,
        description=(
            "A group without progress for so long makes the service Stalled; it may still become ready."
            " A canary whose requests keep its step for so long beyond its time is rolled back."
        ),
    )


class DrainSpec(ApiModel):
    """End of a pod."""

    accept_seconds: int = Field(
        default=5,
        ge=0,
        le=300,
        description="Still accepts requests for at least so long, and on while they come: load balancers lag.",
    )
    seconds: int = Field(
        default=120,
        ge=0,
        le=86_400,
        description="After acceptSeconds, open requests may take so long to finish. New ones may come in its first half.",
    )


class RecoverySpec(ApiModel):
    """Recovery when a rank dies or makes no progress."""

    restart_budget: int = Field(
        default=5, ge=0, le=1000, description="Restarts of a group's pods within windowSeconds before it counts as failed."
    )
    window_seconds: int = Field(default=3600, ge=60, le=604_800, description="Window in which restarts are counted.")
    progress_timeout_seconds: Annotated[int, EngineArgument("progress_timeout", kind=float)] = Field(
        default=20, ge=1, le=3600, description="Work waiting and no step for so long counts as hung."
    )
