"""What a node says of itself, and whom it says it to."""

import hashlib
from pathlib import Path

from starling_agent.contract.config import AgentConfig
from starling_agent.contract.group import GroupMember
from starling_agent.contract.identity import Identity
from starling_agent.contract.report import Report
from starling_agent.group.leader import Leader
from starling_agent.group.membership_service import MembershipService
from starling_agent.group.node_layout import is_led, most_places
from starling_agent.group.remote_membership import RemoteMembershipService

IN_COMMON = {"namespace", "service", "revision", "engine", "layout"}
"""Parts of the configuration. Paths and ports may be a node's own where nodes share a machine."""


def member_of(config: AgentConfig, identity: Identity, report: Report) -> GroupMember:
    return GroupMember(
        node=identity.node,
        pod=identity.pod,
        address=identity.address,
        incarnation=report.incarnation,
        group=identity.group,
        revision=config.revision,
        release=report.agent,
        config_hash=hashlib.sha256(config.model_dump_json(include=IN_COMMON).encode()).hexdigest(),
    )


def leader_of(config: AgentConfig, identity: Identity, report: Report) -> Leader | None:
    """None on nodes that are not the leader."""
    if identity.node > 0:
        return None
    data = 0 if is_led(config) else config.layout.data
    return Leader(member_of(config, identity, report), most_places(config.layout).nodes, data)


def desk_of(config: AgentConfig, identity: Identity, leader: Leader | None) -> MembershipService:
    return leader if leader is not None else RemoteMembershipService(identity.leader, Path(config.admin.token_file))
