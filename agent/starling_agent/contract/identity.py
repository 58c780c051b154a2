"""Which pod this is: set by the pod template through the downward API, by `starling up` for a local process."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

POD_NAME, POD_IP, POD_NAMESPACE, GROUP, HOST = (
    "STARLING_POD_NAME",
    "STARLING_POD_IP",
    "STARLING_NAMESPACE",
    "STARLING_GROUP",
    "STARLING_HOST",
)


@dataclass(frozen=True, slots=True)
class Identity:
    """`node` is the StatefulSet's ordinal at the end of the pod's name; `leader` the name that node 0 is found under."""

    pod: str
    node: int
    group: str
    namespace: str
    address: str
    host: str

    @property
    def leader(self) -> str:
        return f"{self.group}-0.{self.group}.{self.namespace}.svc"


def read_identity(environment: Mapping[str, str] = os.environ) -> Identity:
    """Raises ValueError naming the variable that is missing or of the wrong form."""
    pod = environment.get(POD_NAME, "")
    match = re.fullmatch(r"(?P<group>.+)-(?P<node>[0-9]+)", pod)
    if match is None:
        raise ValueError(f"{POD_NAME} must end in a node number, such as chat-1a2b3c4-0-0; got {pod!r}")
    return Identity(
        pod=pod,
        node=int(match["node"]),
        group=environment.get(GROUP) or match["group"],
        namespace=environment.get(POD_NAMESPACE, "default"),
        address=environment.get(POD_IP, "127.0.0.1"),
        host=environment.get(HOST, ""),
    )
