"""What this release cannot do, and layouts that cannot be, in one place: later releases take lines out."""

from starling_agent.contract.config import AgentConfig, LayoutConfig
from starling_agent.contract.identity import Identity
from starling_agent.group.node_layout import most_places


def refusal(config: AgentConfig, identity: Identity) -> str | None:
    """Why this node cannot take part in the group that was asked for; None when it can."""
    layout = config.layout
    places = most_places(layout)
    bounds = layout.elastic
    sizes = (layout.data,) if bounds is None else (bounds.min, bounds.max)
    wrong = next((wrong for size in sizes if (wrong := _wrong_size(layout, places.workers, size)) is not None), None)
    if wrong is None and identity.node >= places.nodes:
        return f"{identity.pod} is node {identity.node} of group {identity.group}, which has {places.nodes} nodes by its layout"
    return wrong


def _wrong_size(layout: LayoutConfig, workers: int, data: int) -> str | None:
    per_node, ranks = layout.per_node, data * workers
    if (workers % per_node and per_node % workers) or ranks % per_node:
        return (
            f"layout.per_node: must divide the {workers} ranks of a data parallel rank (pipeline {layout.pipeline} * tensor"
            f" {layout.tensor}) or be a multiple of them that divides the group's {ranks} (data {data}), got {per_node}"
        )
    return None
