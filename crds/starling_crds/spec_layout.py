"""The layout that `spec.parallelism` and `spec.accelerators` ask for."""

from starling_crds.layout import GroupLayout
from starling_crds.v1alpha1.parallelism import Parallelism


def group_layout(parallelism: Parallelism, per_node: int = 1) -> GroupLayout:
    """Raises ValueError naming the field of `spec` that can never work, with what is possible."""
    layout = _checked(layout_at(parallelism, _data(parallelism), per_node))
    if parallelism.elastic is not None:
        _check_elastic(parallelism, layout)
    return layout


def elastic_sizes(parallelism: Parallelism, per_node: int = 1) -> tuple[int, ...]:
    """Returns the data parallel sizes that a live group may take: those within `elastic` that fill whole nodes.

    Both bounds are among them.
    """
    bounds = parallelism.elastic
    assert bounds is not None
    low, high = (data_size(parallelism, bound) for bound in (bounds.min, bounds.max))
    return layout_at(parallelism, low, per_node).sizes(low, high)


def data_size(parallelism: Parallelism, size: int) -> int:
    """Returns the data parallel size of a size in the unit of the spec: expert where that is given, else data."""
    return size // parallelism.tensor if parallelism.expert is not None else size


def layout_at(parallelism: Parallelism, data: int, per_node: int) -> GroupLayout:
    """Returns the layout at a data parallel size, possible or not."""
    return GroupLayout(tensor=parallelism.tensor, pipeline=parallelism.pipeline, data=data, per_node=per_node)


def _data(parallelism: Parallelism) -> int:
    if parallelism.data is not None and parallelism.expert is not None:
        raise ValueError("parallelism: give at most one of data and expert; the other follows from expert = data * tensor")
    if parallelism.expert is not None:
        _check_expert("parallelism.expert", parallelism.expert, parallelism.tensor)
        return data_size(parallelism, parallelism.expert)
    return parallelism.data or 1


def _check_expert(field: str, expert: int, tensor: int) -> None:
    if expert % tensor:
        raise ValueError(f"{field}: must be a multiple of parallelism.tensor ({tensor}), got {expert}")


def _checked(layout: GroupLayout) -> GroupLayout:
    if not layout.core_fits_nodes:
        raise ValueError(
            f"accelerators.perNode: must divide the {layout.core_ranks} ranks of a data parallel rank (pipeline {layout.pipeline}"
            f" * tensor {layout.tensor}) or be a multiple of them, got {layout.per_node}"
        )
    if not layout.fills_nodes:
        ranks = layout.ranks
        many = "1 rank" if ranks == 1 else f"{ranks} ranks"
        raise ValueError(
            f"accelerators.perNode: a group has {many} (data {layout.data} * pipeline {layout.pipeline} * tensor {layout.tensor}),"
            f" which do not fill whole nodes of {layout.per_node}; give a divisor of {ranks}"
        )
    return layout


def _check_elastic(parallelism: Parallelism, layout: GroupLayout) -> None:
    """Raises ValueError unless a group can have both bounds, and today's size lies between them."""
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
        if name == "expert":
            _check_expert(field, bound, parallelism.tensor)
        try:
            _checked(layout.with_data(data_size(parallelism, bound)))
        except ValueError as error:
            raise ValueError(f"{field}: {bound} is no size of a group: {error}") from None
