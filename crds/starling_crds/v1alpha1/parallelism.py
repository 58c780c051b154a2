"""`spec.parallelism` and `spec.accelerators`: how one group's work is split, and over what."""

from pydantic import Field
from starling_crds.v1alpha1.base import ApiModel


class ElasticBounds(ApiModel):
    """Sizes that `expert` (or `data`) may take while the service runs."""

    min: int = Field(ge=1, le=4096, description="Smallest size; expert memory is reserved for it.")
    max: int = Field(ge=1, le=4096, description="Largest size; caps the pods of a group.")


class Parallelism(ApiModel):
    """Ways in which one group's work is split. ranks = data * pipeline * tensor; expert = data * tensor."""

    tensor: int = Field(default=1, ge=1, le=1024, description="Tensor parallel size (TP).")
    pipeline: int = Field(default=1, ge=1, le=1024, description="Pipeline parallel size (PP).")
    data: int | None = Field(default=None, ge=1, le=4096, description="Data parallel size (DP). At most one of data and expert.")
    expert: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Expert parallel size (EP) of a MoE model, a multiple of tensor. At most one of data and expert.",
    )
    elastic: ElasticBounds | None = Field(default=None, description="Bounds within which a live service may change size.")


class Accelerators(ApiModel):
    """The devices of one pod."""

    type: str = Field(
        default="cpu",
        min_length=1,
        max_length=253,
        description="cpu, nvidia.com/gpu, or another extended resource's name.",
    )
    per_node: int = Field(default=1, ge=1, le=64, description="Devices, and so ranks, in one pod.")
