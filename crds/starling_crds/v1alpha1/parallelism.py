"""`spec.parallelism` and `spec.accelerators`: how one group's work is split, and over what."""

from typing import Annotated

from pydantic import Field
from starling_crds.rules import Rule
from starling_crds.v1alpha1.base import ApiModel
from starling_crds.v1alpha1.engine_arguments import EngineArgument
from starling_crds.v1alpha1.strings import DeviceResource


class ElasticBounds(ApiModel):
    """Sizes that `expert` (or `data`) may take while the service runs."""

    RULES = (
        Rule(
            field="min",
            cel="self.min <= self.max",
            holds=lambda elastic: elastic.min <= elastic.max,
            message="must be at most max ({max}), got {min}",
        ),
    )

    min: int = Field(ge=1, le=4096, description="Smallest size; expert memory is reserved for it.")
    max: int = Field(ge=1, le=4096, description="Largest size; caps the pods of a group.")


def _within_elastic(field: str) -> Rule:
    value, low, high = f"self.{field}", "self.elastic.min", "self.elastic.max"
    return Rule(
        field=field,
        cel=f"!has(self.elastic) || !has({value}) || ({low} <= {value} && {value} <= {high})",
        holds=lambda split: _is_within(split.elastic, getattr(split, field)),
        message=f"must be within elastic.min ({{elastic.min}}) and elastic.max ({{elastic.max}}), got {{{field}}}",
    )


def _is_within(elastic: ElasticBounds | None, value: int | None) -> bool:
    return elastic is None or value is None or elastic.min <= value <= elastic.max


def _elastic_of_experts(bound: str) -> Rule:
    return Rule(
        field=f"elastic.{bound}",
        cel=f"!has(self.elastic) || !has(self.expert) || self.elastic.{bound} % self.tensor == 0",
        holds=lambda split: split.elastic is None or split.expert is None or getattr(split.elastic, bound) % split.tensor == 0,
        message=f"must be a multiple of tensor ({{tensor}}), as expert must, got {{elastic.{bound}}}",
    )


class Parallelism(ApiModel):
    """Ways in which one group's work is split. ranks = data * pipeline * tensor; expert = data * tensor."""

    RULES = (
        Rule(
            field="data",
            cel="!(has(self.data) && has(self.expert))",
            holds=lambda split: split.data is None or split.expert is None,
            message="at most one of data and expert is possible; remove data ({data}) or expert ({expert})",
        ),
        Rule(
            field="expert",
            cel="!has(self.expert) || self.expert % self.tensor == 0",
            holds=lambda split: split.expert is None or split.expert % split.tensor == 0,
            message="must be a multiple of tensor ({tensor}), got {expert}",
        ),
        Rule(
            field="elastic",
            cel="!has(self.elastic) || has(self.data) || has(self.expert)",
            holds=lambda split: split.elastic is None or split.data is not None or split.expert is not None,
            message="bounds data or expert; give one of them too",
        ),
        _within_elastic("data"),
        _within_elastic("expert"),
        _elastic_of_experts("min"),
        _elastic_of_experts("max"),
    )

    tensor: Annotated[int, EngineArgument("tensor_parallel_size")] = Field(
        default=1, ge=1, le=1024, description="Tensor parallel size (TP)."
    )
    pipeline: Annotated[int, EngineArgument("pipeline_parallel_size")] = Field(
        default=1, ge=1, le=1024, description="Pipeline parallel size (PP)."
    )
    data: Annotated[int | None, EngineArgument("data_parallel_size")] = Field(
        default=None, ge=1, le=4096, description="Data parallel size (DP). At most one of data and expert."
    )
    expert: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Expert parallel size (EP) of a MoE model, a multiple of tensor. At most one of data and expert.",
    )
    elastic: ElasticBounds | None = Field(default=None, description="Bounds within which a live service may change size.")


class Accelerators(ApiModel):
    """The devices of one pod."""

    type: Annotated[DeviceResource, EngineArgument("device")] = Field(
        default="cpu",
        description="cpu, nvidia.com/gpu, or another extended resource's name.",
    )
    per_node: int = Field(default=1, ge=1, le=64, description="Devices, and so ranks, in one pod.")
