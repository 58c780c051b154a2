"""Who may call the API server: a token for each program of the cluster, and a kubeconfig for each token."""

import base64
import json
import secrets
from collections.abc import Iterable
from pathlib import Path

from starling_cluster.certificates import Certificates
from starling_cluster.place import Place

ADMIN = "admin"
CONTROLLERS = "system:kube-controller-manager"
SCHEDULER = "system:kube-scheduler"
PROXY = "system:kube-proxy"
ADMINS = "system:masters"
NODES = "system:nodes"


def node_user(number: int) -> str:
    return f"system:node:n{number}"


def write_all(place: Place, certificates: Certificates, server: str, nodes: Iterable[int]) -> Path:
    """Writes the kubeconfigs; returns the file of tokens for the API server."""
    groups = {ADMIN: ADMINS, CONTROLLERS: "", SCHEDULER: "", PROXY: "", **{node_user(number): NODES for number in nodes}}
    authority = Path(certificates.file("ca.crt")).read_bytes()
    place.make("access").chmod(0o700)
    lines = []
    for user, group in groups.items():
        token = secrets.token_hex(16)
        lines.append(f'{token},{user},{user},"{group}"' if group else f"{token},{user},{user}")
        _write(kubeconfig(place, user), server, authority, token)
    tokens = place.directory / "access" / "tokens.csv"
    tokens.write_text("\n".join(lines) + "\n")
    return tokens


def kubeconfig(place: Place, user: str) -> Path:
    """The administrator's stands where callers look for it."""
    return place.kubeconfig if user == ADMIN else place.directory / "access" / f"{user.replace(':', '-')}.kubeconfig"


def _write(path: Path, server: str, authority: bytes, token: str) -> None:
    """The authority is inside, so that the file can be copied anywhere. JSON is YAML too."""
    cluster = {"server": server, "certificate-authority-data": base64.b64encode(authority).decode()}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "starling-e2e", "cluster": cluster}],
        "users": [{"name": "starling-e2e", "user": {"token": token}}],
        "contexts": [{"name": "starling-e2e", "context": {"cluster": "starling-e2e", "user": "starling-e2e"}}],
        "current-context": "starling-e2e",
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    path.chmod(0o600)
