"""Membership of a group: the call with which its nodes find each other, at the leader's admin endpoint.

    POST /admin/group?after=V&leader=ID&wait=S   GroupMember -> 200 GroupView

Each node reports itself and its cores again and again, and gets the group's members: a long poll. The answer comes at once if the
caller does not know this version of this leader. Else it comes with the next version, or after `wait` seconds (at most 30). A node
that has not polled for a while is out of the view until it polls again. A leader that was started again learns everything from the
nodes' next polls.

Refused with OpenAI's error body:

    401   as everywhere on the admin endpoint
    409   `not_leader`
    409   `other_group`, `other_revision`, `other_release`, `other_configuration`: the nodes of one group share all four
    400   `no_such_node`: the layout has fewer nodes
"""

from pydantic import Field

from starling_agent.contract.config import ContractModel


class GroupCore(ContractModel):
    """One engine core.

    rank      data parallel rank
    address   for frontends of other nodes; another one after each start, and empty while it loads
    taking    it takes their requests; not while its node drains
    joining   where workers of other nodes join it while it loads, and stays; empty where it has none
    """

    rank: int
    address: str = ""
    taking: bool = True
    joining: str = ""


class GroupMember(ContractModel):
    """One node. Fields after `incarnation` must be the same on all nodes of a group.

    draining      it ends, and its workers stay only for the cores that have them
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
