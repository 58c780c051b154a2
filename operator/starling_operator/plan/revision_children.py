"""The children of one revision: a ControllerRevision and a ConfigMap, made once and never changed."""

from starling_operator.plan import names
from starling_operator.plan.manifest import child
from starling_operator.plan.observed import Manifest, Service
from starling_operator.plan.revision import Revision


def revision_children(service: Service, revision: Revision) -> tuple[Manifest, ...]:
    return revision_manifest(service, revision), config_manifest(service, revision)


def revision_manifest(service: Service, revision: Revision) -> Manifest:
    """The ControllerRevision, which the API server lets nobody change."""
    name = names.revision_object(service.name, revision.id)
    return child(service, "apps/v1", "ControllerRevision", name, revision=revision.id) | {
        "revision": revision.number,
        "data": revision.data,
    }


def config_manifest(service: Service, revision: Revision) -> Manifest:
    """The ConfigMap with agent.json."""
    name = names.revision_object(service.name, revision.id)
    return child(service, "v1", "ConfigMap", name, revision=revision.id) | {
        "immutable": True,
        "data": {"agent.json": revision.config},
    }
