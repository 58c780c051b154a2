"""What has to go, each object with the UID that it was seen with."""

from starling_operator.plan import names
from starling_operator.plan.decision import Delete
from starling_operator.plan.group import Group, Groups
from starling_operator.plan.observed import Manifest, Observed
from starling_operator.plan.revision import Revision


def group_deletions(removed: tuple[Group, ...], groups: Groups) -> tuple[Delete, ...]:
    """StatefulSets: their pods get SIGTERM and drain. Then the Services of groups whose last pod has ended."""
    sets = (Delete("StatefulSet", group.name, group.uid, why=_why(group)) for group in removed)
    return (*sets, *(_deletion(service, "its group is gone") for service in groups.orphans))


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


def _why(group: Group) -> str:
    return "a pod of its group is taken away" if group.going else "the group is not wanted any more"


def _deletion(live: Manifest, why: str) -> Delete:
    return Delete(live["kind"], live["metadata"]["name"], live["metadata"].get("uid", ""), why=why)
