"""Identity of this pod, from variables that the pod template sets, or `starling up` for a local process."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from starling_agent.contract.config import ADMIN_PORT

POD_NAME, POD_IP, POD_NAMESPACE, GROUP, HOST, LEADER = (
    "STARLING_POD_NAME",
    "STARLING_POD_IP",
    "STARLING_NAMESPACE",
    "STARLING_GROUP",
    "STARLING_HOST",
    "STARLING_LEADER",
)


@dataclass(frozen=True, slots=True)
class Identity:
    """`node` is the StatefulSet's ordinal at the end of the pod's name; `leader` the host and port of node 0's admin endpoint."""

    pod: str
    node: int
    group: str
    namespace: str
    address: str
    host: str
    leader: str


def read_identity(environment: Mapping[str, str] = os.environ) -> Identity:
    """Raises ValueError naming the variable that is missing or of the wrong form."""
    pod = environment.get(POD_NAME, "")
    match = re.fullmatch(r"(?P<group>.+)-(?P<node>[0-9]+)", pod)
    if match is None:
        raise ValueError(f"{POD_NAME} must end in a node number, such as chat-1a2b3c4-0-0; got {pod!r}")
    group, namespace = environment.get(GROUP) or match["group"], environment.get(POD_NAMESPACE, "default")
    return Identity(
        pod=pod,
        node=int(match["node"]),
        group=group,
        namespace=namespace,
        address=environment.get(POD_IP, "127.0.0.1"),
        host=environment.get(HOST, ""),
        # The headless Service gives each node a name of its own.
        leader=environment.get(LEADER) or f"{group}-0.{group}.{namespace}.svc:{ADMIN_PORT}",
    )
