"""How the nodes of a group find each other: what the leader's admin endpoint takes from them and answers.

    POST /admin/group?after=V&leader=ID&wait=S   Member -> 200 GroupView

A node says what it is and what runs on it, again and again; the answer is who is there. It comes at once when the caller does not
know this version of this leader yet, else when there is another or after `wait` seconds (at most 30): a long poll. A node that has
not asked for a while is out of the view until it asks again, and a leader that was started again learns from the next question of
each node what it has to know.

Refused with OpenAI's error body: 401 as all of the admin endpoint, 409 `not_leader`, 409 `other_group`, `other_revision`,
`other_release`, `other_configuration` (nodes of one group must have them in common), 400 `no_such_node` (the layout has fewer).
"""

from pydantic import Field

from starling_agent.contract.config import ContractModel


class GroupCore(ContractModel):
    """One engine core.

    rank      data parallel rank
    address   where frontends of other nodes reach it; another one after each start, and empty while it loads
    taking    whether it takes their requests; not while its node drains
    joining   while it loads: where workers of other nodes have to join it; empty where it has none. It stays after the load
    """

    rank: int
    address: str = ""
    taking: bool = True
    joining: str = ""


class GroupMember(ContractModel):
    """One node. What follows `incarnation` must be the same on all nodes of a group.

    draining      it is going, and its workers stay only for the cores that have them
    incarnation   id of this agent process
    config_hash   SHA-256 of what agents' configurations must have in common, hex
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
    """incarnation: id of the leader's process, within which versions count.

    data     data parallel ranks that take requests: the first so many
    target   the same when the change of size that is under way is done
    """

    incarnation: str
    version: int
    data: int
    target: int
    members: list[GroupMember] = Field(default_factory=list)
