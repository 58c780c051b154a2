"""Head that all children share: name, namespace, labels and owner."""

from typing import Any

from starling_operator.plan import labels
from starling_operator.plan.observed import Manifest, Service


def child(
    service: Service, api_version: str, kind: str, name: str, *, revision: str | None = None, group: str | None = None
) -> Manifest:
    """Returns apiVersion, kind and metadata. blockOwnerDeletion is false: no deletion waits for an operator that is gone."""
    all_labels = dict(labels.common(service))
    if revision is not None:
        all_labels[labels.REVISION] = revision
    if group is not None:
        all_labels[labels.GROUP] = group
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": service.namespace,
        "labels": all_labels,
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
