"""Layouts that this release cannot run, and layouts that cannot be."""

from starling_agent.contract.config import AgentConfig, LayoutConfig
from starling_agent.contract.identity import Identity


def refusal(config: AgentConfig, identity: Identity) -> str | None:
    """Returns why this node cannot take part in the group that was asked for; None when it can."""
    layout = config.layout
    bounds, nodes = layout.elastic, layout.largest.nodes
    sizes = (layout.data,) if bounds is None else (bounds.min, bounds.max)
    wrong = next((wrong for size in sizes if (wrong := _wrong_size(layout, size)) is not None), None)
    if wrong is None and identity.node >= nodes:
        return f"{identity.pod} is node {identity.node} of group {identity.group}, which has {nodes} nodes by its layout"
    return wrong


def _wrong_size(layout: LayoutConfig, data: int) -> str | None:
    group = layout.at(data)
    if group.core_fits_nodes and group.fills_nodes:
        return None
    return (
        f"layout.per_node: must divide the {group.core_ranks} ranks of a data parallel rank (pipeline {group.pipeline} * tensor"
        f" {group.tensor}) or be a multiple of them that divides the group's {group.ranks} (data {data}), got {group.per_node}"
    )
