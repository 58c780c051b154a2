"""Layout arithmetic: how many ranks and nodes a group has. Pure; the CRD's CEL rules say the same, and the engine checks again."""

from dataclasses import dataclass

from starling_crds.v1alpha1.parallelism import Parallelism


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One group. `expert` is the size that experts are spread over if the model is MoE: data * tensor."""

    nodes: int
    ranks: int
    tensor: int
    pipeline: int
    data: int
    expert: int

    def __str__(self) -> str:
        return f"TP{self.tensor} PP{self.pipeline} DP{self.data}"


def group_layout(parallelism: Parallelism, per_node: int = 1) -> GroupLayout:
    """Raises ValueError naming the field of `spec` that can never work, with what is possible."""
    layout = _sized(parallelism.tensor, parallelism.pipeline, _data(parallelism), per_node)
    if parallelism.elastic is not None:
        _check_elastic(parallelism, per_node)
    return layout


def elastic_sizes(parallelism: Parallelism, per_node: int = 1) -> tuple[int, ...]:
    """Data parallel sizes that a live group may take: within `elastic`, on whole nodes. The bounds are always among them."""
    bounds = parallelism.elastic
    assert bounds is not None
    each = parallelism.tensor if parallelism.expert is not None else 1
    one = parallelism.tensor * parallelism.pipeline
    return tuple(data for data in range(bounds.min // each, bounds.max // each + 1) if data * one % per_node == 0)


def with_data(layout: GroupLayout, data: int) -> GroupLayout:
    """The same group at another data parallel size, which fills whole nodes too."""
    per_node, one = layout.ranks // layout.nodes, layout.tensor * layout.pipeline
    ranks = data * one
    return GroupLayout(
        nodes=-(-ranks // per_node),
        ranks=ranks,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        data=data,
        expert=data * layout.tensor,
    )


def _data(parallelism: Parallelism) -> int:
    if parallelism.data is not None and parallelism.expert is not None:
        raise ValueError("parallelism: give at most one of data and expert; the other follows from expert = data * tensor")
    if parallelism.expert is not None:
        return _data_of_expert("parallelism.expert", parallelism.expert, parallelism.tensor)
    return parallelism.data or 1


def _data_of_expert(field: str, expert: int, tensor: int) -> int:
    if expert % tensor:
        raise ValueError(f"{field}: must be a multiple of parallelism.tensor ({tensor}), got {expert}")
    return expert // tensor


def _sized(tensor: int, pipeline: int, data: int, per_node: int) -> GroupLayout:
    if tensor % per_node and per_node % tensor:
        raise ValueError(
            f"accelerators.perNode: of parallelism.tensor ({tensor}) and perNode ({per_node}) one must divide the other"
        )
    ranks = tensor * pipeline * data
    if ranks % per_node:
        many = "1 rank" if ranks == 1 else f"{ranks} ranks"
        raise ValueError(
            f"accelerators.perNode: a group has {many} (data {data} * pipeline {pipeline} * tensor {tensor}), which do not"
            f" fill whole nodes of {per_node}; give a divisor of {ranks}"
        )
    return GroupLayout(nodes=ranks // per_node, ranks=ranks, tensor=tensor, pipeline=pipeline, data=data, expert=data * tensor)


def _check_elastic(parallelism: Parallelism, per_node: int) -> None:
    """Both bounds have to be sizes that a group can have, and today's size lies between them."""
    bounds = parallelism.elastic
    assert bounds is not None
    name = "expert" if parallelism.expert is not None else "data"
    size = parallelism.expert if parallelism.expert is not None else parallelism.data or 1
    if bounds.min > bounds.max:
        raise ValueError(f"parallelism.elastic: min ({bounds.min}) must not be above max ({bounds.max})")
    if not bounds.min <= size <= bounds.max:
        raise ValueError(f"parallelism.{name}: must be within elastic {bounds.min}..{bounds.max}, got {size}")
    for end, bound in (("min", bounds.min), ("max", bounds.max)):
        field = f"parallelism.elastic.{end}"
        data = _data_of_expert(field, bound, parallelism.tensor) if name == "expert" else bound
        try:
            _sized(parallelism.tensor, parallelism.pipeline, data, per_node)
        except ValueError as error:
            raise ValueError(f"{field}: {bound} is no size of a group: {error}") from None
