"""`spec.scaling`: what the operator does about the number of groups by itself."""

from pydantic import Field
from starling_crds.v1alpha1.base import ApiModel


class ScalingSpec(ApiModel):
    """Scaling to zero. `spec.replicas` is never written: it says how many groups there are while the service is used."""

    idle_seconds: int | None = Field(
        default=None,
        ge=10,
        le=604_800,
        description=(
            "After so long without a request all groups go. The next request brings spec.replicas of them back, one if that is 0."
            " Needs router. Default: groups stay."
        ),
    )
