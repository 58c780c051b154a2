"""The operator's key: one Secret in its own namespace, from which the tokens of all services are derived.

The first operator creates it. Each process reads it once, when it starts; another key makes other tokens.
"""

import base64
import secrets

from starling_operator.cluster.kinds import MANAGER, SECRET
from starling_operator.cluster.kube import READ_SECONDS, Kube, KubeError
from starling_operator.plan.observed import Manifest

NAME, FIELD = "starling-operator-key", "key"
BYTES = 32


async def operator_key(kube: Kube, namespace: str) -> bytes:
    """Returns the key. Of replicas that find none, one creates it and all read it. Raises KubeError; ValueError if it is short."""
    path = SECRET.path(namespace, NAME)
    try:
        return _read(await kube.get(path))
    except KubeError as error:
        if error.status != 404:
            raise
    try:
        # Bypasses the fence: the key is created before there is a Lease, and only once.
        await kube.request("POST", SECRET.path(namespace), {"fieldManager": MANAGER}, _new(namespace), seconds=READ_SECONDS)
    except KubeError as error:
        if error.reason != "AlreadyExists":
            raise
    return _read(await kube.get(path))


def _new(namespace: str) -> Manifest:
    labels = {"app.kubernetes.io/name": "starling-operator", "app.kubernetes.io/part-of": "starling"}
    return {
        "apiVersion": SECRET.api_version,
        "kind": SECRET.name,
        "metadata": {"name": NAME, "namespace": namespace, "labels": labels},
        "type": "Opaque",
        "immutable": True,
        "data": {FIELD: base64.b64encode(secrets.token_bytes(BYTES)).decode()},
    }


def _read(secret: Manifest) -> bytes:
    """Raises ValueError for a short key: who can guess the key can make every token."""
    key = base64.b64decode((secret.get("data") or {}).get(FIELD, ""))
    if len(key) < BYTES:
        name = f"{secret['metadata']['namespace']}/{NAME}"
        raise ValueError(f"Secret {name} has no key of at least {BYTES} bytes in {FIELD!r}; delete it, and another one is created")
    return key
