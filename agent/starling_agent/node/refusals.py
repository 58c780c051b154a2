"""What this release cannot do, in one place: later ones take lines out."""

from starling_agent.contract.config import AgentConfig
from starling_agent.contract.identity import Identity


def refusal(config: AgentConfig, identity: Identity) -> str | None:
    """Why this node cannot take part in the group that was asked for; None when it can."""
    ranks = config.layout.tensor * config.layout.pipeline
    if config.layout.per_node != ranks:
        return (
            f"layout.per_node: a group runs in one pod in this release, so it must be all of its {ranks} ranks"
            f" (tensor {config.layout.tensor} * pipeline {config.layout.pipeline}), got {config.layout.per_node}"
        )
    if identity.node > 0:
        return (
            f"{identity.pod} is node {identity.node} of group {identity.group}: "
            "a group of several nodes is not possible in this release; only node 0 serves"
        )
    return None
