"""The head that all children share: name, namespace, labels, owner."""

from typing import Any

from starling_operator.plan import labels
from starling_operator.plan.observed import Manifest, Service


def child(
    service: Service, api_version: str, kind: str, name: str, *, revision: str | None = None, group: str | None = None
) -> Manifest:
    """apiVersion, kind and metadata. blockOwnerDeletion is false, so that nothing ever waits for an operator that is gone."""
    own = dict(labels.common(service))
    if revision is not None:
        own[labels.REVISION] = revision
    if group is not None:
        own[labels.GROUP] = group
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": service.namespace,
        "labels": own,
        "ownerReferences": [
            {
                "apiVersion": labels.API_VERSION,
                "kind": labels.KIND,
                "name": service.name,
                "uid": service.uid,
                "controller": True,
                "blockOwnerDeletion": False,
            }
        ],
    }
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}
