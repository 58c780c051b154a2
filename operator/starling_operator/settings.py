"""Settings of the operator's process. `starling operator` parses them once, before anything starts."""

import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

from starling_agent.contract.listening import EVERYWHERE

from starling_operator.plan.observed import Settings

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True, kw_only=True)
class OperatorSettings:
    """namespaces   to serve; empty: the whole cluster
    class_name   of the services to serve, in spec.className; "": those without one
    api_key_secrets   names of Secrets, in any of the namespaces, whose changes are brought to pods at once
    identity     of this process in the Lease; no two processes may share one
    parallel     services that are reconciled at the same time
    http_host, http_port   of /healthz, /readyz and /metrics
    """

    plan: Settings
    namespaces: tuple[str, ...] = ()
    class_name: str = ""
    api_key_secrets: tuple[str, ...] = ()
    lease_name: str = "starling-operator"
    identity: str = field(default_factory=lambda: f"{socket.gethostname()}_{os.urandom(4).hex()}")
    parallel: int = 8
    http_host: str = EVERYWHERE
    http_port: int = 8080

    @property
    def scopes(self) -> tuple[str | None, ...]:
        """Namespaces to list and watch; None for all of them."""
        return self.namespaces or (None,)


def own_namespace(default: str = "starling-system") -> str:
    """Returns the namespace of this pod; `default` outside of a cluster."""
    return _NAMESPACE_FILE.read_text().strip() if _NAMESPACE_FILE.exists() else default
