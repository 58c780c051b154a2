"""The children of one group: a headless Service and a StatefulSet, both named as the group."""

from starling_agent.contract.config import ADMIN_PORT

from starling_operator.plan import labels
from starling_operator.plan.manifest import child
from starling_operator.plan.observed import Manifest, Service
from starling_operator.plan.revision import Revision
from starling_operator.plan.token import with_token


def group_children(service: Service, revision: Revision, group: str, nodes: int, token: str) -> tuple[Manifest, ...]:
    """The Service first: pods look for their leader by it."""
    return headless_service(service, revision, group), stateful_set(service, revision, group, nodes, token)


def headless_service(service: Service, revision: Revision, group: str) -> Manifest:
    """Nodes find their leader before any of them is ready."""
    return child(service, "v1", "Service", group, revision=revision.id, group=group) | {
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _selector(service, group),
            "ports": [{"name": "admin", "port": ADMIN_PORT, "targetPort": ADMIN_PORT, "protocol": "TCP"}],
        }
    }


def stateful_set(service: Service, revision: Revision, group: str, nodes: int, token: str) -> Manifest:
    """Never updated in place: its own rolling update would wait for one node of a gang while the others wait for that node."""
    template = with_token(service, revision.template, token)
    metadata = template["metadata"]
    own = {labels.GROUP: group}
    return child(service, "apps/v1", "StatefulSet", group, revision=revision.id, group=group) | {
        "spec": {
            "replicas": nodes,
            "serviceName": group,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "revisionHistoryLimit": 1,
            "selector": {"matchLabels": _selector(service, group)},
            "template": template | {"metadata": metadata | {"labels": metadata["labels"] | own}},
        }
    }


def _selector(service: Service, group: str) -> dict[str, str]:
    return {labels.SERVICE: service.name, labels.GROUP: group}
