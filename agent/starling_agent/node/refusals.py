"""What this release cannot do, and layouts that cannot be, in one place: later releases take lines out."""

from starling_agent.contract.config import AgentConfig, LayoutConfig
from starling_agent.contract.identity import Identity
from starling_agent.group.places import Places


def refusal(config: AgentConfig, identity: Identity) -> str | None:
    """Why this node cannot take part in the group that was asked for; None when it can."""
    layout = config.layout
    places = Places(layout, layout.data)
    if layout.elastic is not None:
        return "layout.elastic: a group keeps its size in this release; leave it out"
    wrong = _wrong_size(layout, places.workers)
    if wrong is None and identity.node >= places.nodes:
        return f"{identity.pod} is node {identity.node} of group {identity.group}, which has {places.nodes} nodes by its layout"
    return wrong


def _wrong_size(layout: LayoutConfig, workers: int) -> str | None:
    per_node, ranks = layout.per_node, layout.data * workers
    if (workers % per_node and per_node % workers) or ranks % per_node:
        return (
            f"layout.per_node: must divide the {workers} ranks of a data parallel rank (pipeline {layout.pipeline} * tensor"
            f" {layout.tensor}) or be a multiple of them that divides the group's {ranks} (data {layout.data}), got {per_node}"
        )
    return None
