"""This node as a member of its group."""

import hashlib

from starling_agent.contract.config import AgentConfig
from starling_agent.contract.group import GroupMember
from starling_agent.contract.identity import Identity
from starling_agent.contract.report import Report

SHARED_FIELDS = {"namespace", "service", "revision", "engine", "layout"}
"""Parts of the configuration that all nodes have in common. Nodes that share a machine differ in paths and ports."""


def make_member(config: AgentConfig, identity: Identity, report: Report) -> GroupMember:
    return GroupMember(
        node=identity.node,
        pod=identity.pod,
        address=identity.address,
        incarnation=report.incarnation,
        group=identity.group,
        revision=config.revision,
        release=report.agent,
        config_hash=hashlib.sha256(config.model_dump_json(include=SHARED_FIELDS).encode()).hexdigest(),
    )
