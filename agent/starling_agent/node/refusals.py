"""What this release cannot do, in one place: later ones take lines out."""

from starling_agent.contract.config import AgentConfig
from starling_agent.contract.identity import Identity


def refusal(config: AgentConfig, identity: Identity) -> str | None:
    """Why this node cannot take part in the group that was asked for; None when it can."""
    for name in ("tensor", "pipeline", "per_node"):
        size = getattr(config.layout, name)
        if size != 1:
            return f"layout.{name}: a group of more than one rank is not possible in this release; only 1 is, got {size}"
    if identity.node > 0:
        return (
            f"{identity.pod} is node {identity.node} of group {identity.group}: "
            "a group of several nodes is not possible in this release; only node 0 serves"
        )
    return None
