"""Objects that the watches have shown, in memory. Observing reads only these, so a quiet reconcile costs no request.

Of managedFields only ours are stored, as text. Readers must not change objects. Answers to our writes are put in at once: no
decision is made on a state older than our last write.
"""

from collections.abc import Container, Mapping, MutableMapping
from typing import TypeVar

from starling_operator.cluster.kinds import GROUP_LABEL, INFERENCE_SERVICE, POD, ROUTER_LABEL, SERVICE_LABEL, Kind
from starling_operator.logs import Key
from starling_operator.plan.gangs import waiting_gangs
from starling_operator.plan.observed import Gang, Manifest, Pod, RouterPod
from starling_operator.watch.ownership import applied_fields
from starling_operator.watch.pods import read_pod, read_router_pod

_TOMBSTONES = 20_000
_Outer = TypeVar("_Outer")
_Inner = TypeVar("_Inner")
_Value = TypeVar("_Value")


def version_of(body: Manifest) -> int:
    return int(body["metadata"]["resourceVersion"])


def controller_of(body: Manifest) -> Manifest | None:
    return next((owner for owner in body["metadata"].get("ownerReferences", ()) if owner.get("controller")), None)


class Cache:
    """Objects by UID. Only a newer version changes anything, and a deleted object stays deleted."""

    def __init__(self) -> None:
        self._services: dict[Key, Manifest] = {}
        self._children: dict[str, dict[tuple[str, str], Manifest]] = {}
        self._pods: dict[Key, dict[str, Pod]] = {}
        self._routers: dict[Key, dict[str, RouterPod]] = {}
        self._seen: dict[str, tuple[Kind, str, str, int]] = {}
        self._index: dict[str, tuple[Key, str]] = {}
        self._gone: dict[str, None] = {}
        self._unscheduled: set[str] = set()

    def service(self, key: Key) -> Manifest | None:
        return self._services.get(key)

    def all_services(self) -> tuple[Key, ...]:
        return tuple(self._services)

    def children(self, owner_uid: str) -> Mapping[tuple[str, str], Manifest]:
        return self._children.get(owner_uid, {})

    def pods(self, key: Key) -> tuple[Pod, ...]:
        """Returns pods of the service's own StatefulSets: others may give theirs the same labels."""
        found = (pod for pod in self._pods.get(key, {}).values() if self._belongs(key, pod))
        return tuple(sorted(found, key=lambda pod: (pod.group, pod.number, pod.uid)))

    def routers(self, key: Key) -> tuple[RouterPod, ...]:
        """Returns pods with the label of the service's routers: whoever makes one there can mount the routers' Secret as well."""
        return tuple(sorted(self._routers.get(key, {}).values(), key=lambda pod: pod.name))

    def gangs(self) -> tuple[Gang, ...]:
        """Returns the gangs of all services that wait for nodes; only services with an unscheduled pod can have one."""
        keys = sorted({self._index[uid][0] for uid in self._unscheduled})
        return tuple(gang for key in keys for gang in waiting_gangs(key, self.pods(key)))

    def put(self, kind: Kind, body: Manifest) -> Key | None:
        """Stores a version of an object. Returns the service that it belongs to if it is news, else None."""
        metadata = body["metadata"]
        uid, version = metadata["uid"], version_of(body)
        held = self._seen.get(uid)
        if uid in self._gone or (held is not None and held[3] >= version):
            return None
        before = self._forget(uid)
        self._seen[uid] = (kind, metadata["namespace"], metadata["name"], version)
        trimmed = {**body, "metadata": {**metadata, "managedFields": applied_fields(metadata)}}
        return self._insert(kind, uid, trimmed) or before

    def drop(self, uid: str) -> Key | None:
        """Removes a deleted object. Returns the service that it belonged to if that is news, else None."""
        self._gone[uid] = None
        if len(self._gone) > _TOMBSTONES:
            del self._gone[next(iter(self._gone))]
        return self._forget(uid)

    def drop_unlisted(self, kind: Kind, namespace: str | None, listed: Container[str], at: int) -> list[Key]:
        """Removes what a list of version `at`, with the UIDs `listed`, no longer has. Returns the services that it belonged to."""
        # Objects that were written after the list was made are not in it.
        missed = [uid for uid, version in self.seen(kind, namespace).items() if uid not in listed and version <= at]
        return [key for uid in missed if (key := self.drop(uid)) is not None]

    def seen(self, kind: Kind, namespace: str | None) -> dict[str, int]:
        """Returns resourceVersions by UID of the stored objects of one kind."""
        return {
            uid: version
            for uid, (its_kind, its_namespace, _, version) in self._seen.items()
            if its_kind is kind and namespace in (None, its_namespace)
        }

    def is_gone(self, uid: str) -> bool:
        return uid in self._gone

    def _forget(self, uid: str) -> Key | None:
        seen = self._seen.pop(uid, None)
        key, owner_uid = self._index.pop(uid, (None, ""))
        if seen is None or key is None:
            return None
        kind, _, name, _ = seen
        if kind is INFERENCE_SERVICE and self._uid_of(key) == uid:
            del self._services[key]
        elif kind is POD:
            _remove(self._pods, key, uid)
            _remove(self._routers, key, uid)
            self._unscheduled.discard(uid)
        else:
            held = self._children.get(owner_uid, {}).get((kind.name, name))
            if held is not None and held["metadata"]["uid"] == uid:
                _remove(self._children, owner_uid, (kind.name, name))
        return key

    def _insert(self, kind: Kind, uid: str, body: Manifest) -> Key | None:
        metadata = body["metadata"]
        owner, labels = controller_of(body) or {}, metadata.get("labels") or {}
        is_group = owner.get("kind") == "StatefulSet"
        if kind is INFERENCE_SERVICE:
            key, owner_uid = (metadata["namespace"], metadata["name"]), ""
            self._services[key] = body
        elif kind is POD and SERVICE_LABEL in labels and is_group and owner["name"] == labels.get(GROUP_LABEL):
            key, owner_uid = (metadata["namespace"], labels[SERVICE_LABEL]), ""
            pod = self._pods.setdefault(key, {})[uid] = read_pod(body)
            if not pod.scheduled:
                self._unscheduled.add(uid)
        elif kind is POD and ROUTER_LABEL in labels:
            key, owner_uid = (metadata["namespace"], labels[ROUTER_LABEL]), ""
            self._routers.setdefault(key, {})[uid] = read_router_pod(body)
        elif owner.get("kind") == INFERENCE_SERVICE.name:
            key, owner_uid = (metadata["namespace"], owner["name"]), owner["uid"]
            self._children.setdefault(owner_uid, {})[kind.name, metadata["name"]] = body
        else:
            return None
        self._index[uid] = (key, owner_uid)
        return key

    def _belongs(self, key: Key, pod: Pod) -> bool:
        """Returns whether the pod is of the service. Of a StatefulSet that this operator never saw only deleted pods count."""
        held = self._index.get(pod.owner)
        if held is not None:
            return held[0] == key
        return pod.owner in self._gone or (pod.deleted_at is not None and not pod.unlabelled)

    def _uid_of(self, key: Key) -> str | None:
        body = self._services.get(key)
        return None if body is None else body["metadata"]["uid"]


def _remove(table: MutableMapping[_Outer, dict[_Inner, _Value]], outer: _Outer, inner: _Inner) -> None:
    row = table.get(outer, {})
    row.pop(inner, None)
    if not row:
        table.pop(outer, None)
