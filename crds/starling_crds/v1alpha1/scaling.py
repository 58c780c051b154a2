"""`spec.scaling`: what the operator does about the number of groups by itself."""

from typing import Literal

from pydantic import Field
from starling_crds.rules import Rule
from starling_crds.v1alpha1.base import ApiModel


class ScalingSpec(ApiModel):
    """Scaling to zero. `spec.replicas` is never written: it says how many groups there are while the service is used."""

    RULES = (
        Rule(
            field="standby",
            cel="self.standby == 'none' || has(self.idleSeconds)",
            holds=lambda scaling: scaling.standby == "none" or scaling.idle_seconds is not None,
            message="must be none without idleSeconds, which says when the service is idle, got {standby}",
        ),
        Rule(
            field="sleepLevel",
            cel="!has(self.sleepLevel) || self.standby == 'asleep'",
            holds=lambda scaling: scaling.sleep_level is None or scaling.standby == "asleep",
            message="needs standby: asleep",
        ),
    )

    idle_seconds: int | None = Field(
        default=None,
        ge=10,
        le=604_800,
        description=(
            "After so long without a request all groups go, or sleep. The next request brings spec.replicas of them back, one if"
            " that is 0. Needs router. Default: groups stay."
        ),
    )
    standby: Literal["none", "asleep"] = Field(
        default="none",
        description=(
            "What is left of an idle service. none: no pod. asleep: its pods, which give back the memory of their KV cache and"
            " weights and keep their devices; the next request wakes them, in a fraction of a start."
        ),
    )
    sleep_level: int | None = Field(
        default=None,
        ge=1,
        le=2,
        description=(
            "With standby: asleep. 1: weights wait in host memory, for which a pod on GPUs needs room; 2: they are dropped, and"
            " read again. Default: 1."
        ),
    )

    @property
    def standby_level(self) -> int:
        """Level at which groups of an idle service sleep; 0: they go."""
        return (self.sleep_level or 1) if self.standby == "asleep" else 0
