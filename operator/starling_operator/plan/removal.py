"""What has to go, each object with the UID that it was seen with."""

from starling_operator.plan import names
from starling_operator.plan.decision import Delete
from starling_operator.plan.group import Group, Groups
from starling_operator.plan.observed import Manifest, Observed
from starling_operator.plan.revision import Revision


def group_deletions(observed: Observed, removed: tuple[Group, ...], groups: Groups) -> tuple[Delete, ...]:
    """The StatefulSet first: its pods get SIGTERM and drain. Then what is left of groups that went before."""
    gone: list[Delete] = []
    for group in removed:
        gone.append(Delete("StatefulSet", group.name, group.uid, why="the group is not wanted any more"))
        service = observed.children.get(("Service", group.name))
        if service is not None:
            gone.append(_deletion(service, "its group is not wanted any more"))
    return (*gone, *(_deletion(service, "its group is gone") for service in groups.orphans))


def revision_deletions(observed: Observed, gone: tuple[Revision, ...]) -> tuple[Delete, ...]:
    """The ControllerRevision last: as long as it is there, its ConfigMaps are found through it."""
    found: list[Delete] = []
    for revision in gone:
        name = names.revision_object(observed.service.name, revision.id)
        for config in (name, names.pin(observed.service.name, revision.id)):
            live = observed.children.get(("ConfigMap", config))
            if live is not None:
                found.append(_deletion(live, "its revision is old and unused"))
        found.append(Delete("ControllerRevision", name, revision.uid, why="old and unused"))
    return tuple(found)


def _deletion(live: Manifest, why: str) -> Delete:
    return Delete(live["kind"], live["metadata"]["name"], live["metadata"].get("uid", ""), why=why)
