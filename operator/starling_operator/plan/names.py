"""Names of children. A service's name has at most 40 characters. So a group's has at most 52, and its pods' labels fit into 63."""

import hashlib

MAX_INDEX = 999
"""Largest number of a group: one digit more would not fit."""


def revision_object(service: str, revision: str) -> str:
    """The ControllerRevision and the ConfigMap of a revision."""
    return f"{service}-{revision}"


def pin(service: str, revision: str) -> str:
    """The ConfigMap with the commit of a revision's weights."""
    return f"{service}-{revision}-pin"


def group(service: str, revision: str, index: int) -> str:
    return f"{service}-{revision}-{index}"


def group_index(name: str) -> int:
    return int(name.rpartition("-")[2])


def service_account(service: str) -> str:
    return f"{service}-agent"


def router(service: str) -> str:
    """The Deployment of the routers, its budget, its policy, and the ConfigMap with a canary."""
    return f"{service}-router"


def backends(service: str) -> str:
    """The headless Service that names all agents to the routers."""
    return f"{service}-backends"


def with_digest(name: str, content: str) -> str:
    """The name of a Secret that is never read: if it exists, it has this content."""
    return f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"


def host(service: str, namespace: str, cluster_domain: str) -> str:
    """DNS name of the service inside the cluster."""
    return f"{service}.{namespace}.svc.{cluster_domain}"
