"""Membership of a group: the call by which its nodes find one another, at the leader's admin endpoint.

    POST /admin/group?after=V&leader=ID&wait=S   GroupMember -> 200 GroupView

A long poll: each node reports itself and its cores repeatedly, and is answered with the group's members. The answer comes at once
unless `after` and `leader` are the leader's present version and incarnation. Then it comes with the next version, or after `wait`
seconds (at most 30). A node
that has not polled for a while is out of the view until it polls again. A leader that was started again learns everything from the
nodes' next polls.

Refused with OpenAI's error body:

    401   as everywhere on the admin endpoint
    409   `not_leader`: this node is not the group's leader
    409   `other_group`, `other_revision`, `other_release`, `other_configuration`: the nodes of one group share all four
    400   `no_such_node`: `node` is not below the layout's number of nodes
"""

from pydantic import Field

from starling_agent.contract.config import ContractModel


class GroupCore(ContractModel):
    """One engine core.

    rank      data parallel rank
    address   where frontends of other nodes connect; changes with each start, empty while the core loads
    taking    whether it accepts requests from them; False while its node drains
    joining   where its workers on other nodes connect; set once it loads, empty if it has none
    """

    rank: int
    address: str = ""
    taking: bool = True
    joining: str = ""


class GroupMember(ContractModel):
    """One node. Fields after `incarnation` must be the same on all nodes of a group.

    draining      the node is ending; its workers run on only for cores of other nodes that still use them
    incarnation   id of this agent process
    config_hash   SHA-256 of the shared part of agents' configurations, hex
    """

    node: int
    pod: str
    address: str
    cores: list[GroupCore] = Field(default_factory=list)
    draining: bool = False
    incarnation: str
    group: str
    revision: str
    release: str
    config_hash: str


class GroupView(ContractModel):
    """The group as its leader knows it.

    incarnation   id of the leader's process, within which versions count
    data          number of data parallel ranks that take requests: the first ones
    target        the same after the present change of size
    """

    incarnation: str
    version: int
    data: int
    target: int
    members: list[GroupMember] = Field(default_factory=list)
