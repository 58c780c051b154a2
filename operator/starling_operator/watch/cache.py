"""What the watches have shown, in memory. Observing reads only this, so a quiet reconcile asks the API server for nothing.

Of managedFields only our own are held, as text. Objects must not be changed by who reads them. Answers to our writes go in at once:
the next decision is never made on a state older than our last write.
"""

from collections.abc import Container, Mapping, MutableMapping
from typing import TypeVar

from starling_operator.cluster.kinds import GROUP_LABEL, INFERENCE_SERVICE, POD, SERVICE_LABEL, Kind
from starling_operator.logs import Key
from starling_operator.plan.gangs import waiting_gangs
from starling_operator.plan.observed import Gang, Manifest, Pod
from starling_operator.watch.ownership import own_fields
from starling_operator.watch.pods import read_pod

_TOMBSTONES = 20_000
_Outer = TypeVar("_Outer")
_Inner = TypeVar("_Inner")
_Value = TypeVar("_Value")


def version_of(body: Manifest) -> int:
    return int(body["metadata"]["resourceVersion"])


def controller_of(body: Manifest) -> Manifest | None:
    return next((owner for owner in body["metadata"].get("ownerReferences", ()) if owner.get("controller")), None)


class Cache:
    """Objects by UID. Only an object newer than the one held changes anything, and one that is gone stays gone."""

    def __init__(self) -> None:
        self._services: dict[Key, Manifest] = {}
        self._children: dict[str, dict[tuple[str, str], Manifest]] = {}
        self._pods: dict[Key, dict[str, Pod]] = {}
        self._seen: dict[str, tuple[Kind, str, str, int]] = {}
        self._where: dict[str, tuple[Key, str]] = {}
        self._gone: dict[str, None] = {}
        self._unplaced: set[str] = set()

    def service(self, key: Key) -> Manifest | None:
        return self._services.get(key)

    def all_services(self) -> tuple[Key, ...]:
        return tuple(self._services)

    def children(self, owner_uid: str) -> Mapping[tuple[str, str], Manifest]:
        return self._children.get(owner_uid, {})

    def pods(self, key: Key) -> tuple[Pod, ...]:
        """Of its own StatefulSets: others may give theirs the same labels."""
        own = (pod for pod in self._pods.get(key, {}).values() if self._is_own(key, pod))
        return tuple(sorted(own, key=lambda pod: (pod.group, pod.number, pod.uid)))

    def gangs(self) -> tuple[Gang, ...]:
        """Of all services, those that wait for nodes. Only services with a pod that has none are looked at."""
        keys = sorted({self._where[uid][0] for uid in self._unplaced})
        return tuple(gang for key in keys for gang in waiting_gangs(key, self.pods(key)))

    def put(self, kind: Kind, body: Manifest) -> Key | None:
        """The service that this is news for, if it is news."""
        metadata = body["metadata"]
        uid, version = metadata["uid"], version_of(body)
        held = self._seen.get(uid)
        if uid in self._gone or (held is not None and held[3] >= version):
            return None
        before = self._forget(uid)
        self._seen[uid] = (kind, metadata["namespace"], metadata["name"], version)
        trimmed = {**body, "metadata": {**metadata, "managedFields": own_fields(metadata)}}
        return self._place(kind, uid, trimmed) or before

    def drop(self, uid: str) -> Key | None:
        """The object is gone. Returns the service that this is news for."""
        self._gone[uid] = None
        if len(self._gone) > _TOMBSTONES:
            del self._gone[next(iter(self._gone))]
        return self._forget(uid)

    def drop_unlisted(self, kind: Kind, namespace: str | None, listed: Container[str], at: int) -> list[Key]:
        """What a list of version `at`, with the UIDs `listed`, no longer has, is gone. Returns the services that it is news for."""
        # What was written after the list was made is not in it.
        missed = [uid for uid, version in self.seen(kind, namespace).items() if uid not in listed and version <= at]
        return [key for uid in missed if (key := self.drop(uid)) is not None]

    def seen(self, kind: Kind, namespace: str | None) -> dict[str, int]:
        """resourceVersions by UID of what is held of one kind."""
        return {
            uid: version
            for uid, (its_kind, its_namespace, _, version) in self._seen.items()
            if its_kind is kind and namespace in (None, its_namespace)
        }

    def is_gone(self, uid: str) -> bool:
        return uid in self._gone

    def _forget(self, uid: str) -> Key | None:
        seen = self._seen.pop(uid, None)
        key, owner_uid = self._where.pop(uid, (None, ""))
        if seen is None or key is None:
            return None
        kind, _, name, _ = seen
        if kind is INFERENCE_SERVICE and self._uid_of(key) == uid:
            del self._services[key]
        elif kind is POD:
            _remove(self._pods, key, uid)
            self._unplaced.discard(uid)
        else:
            held = self._children.get(owner_uid, {}).get((kind.name, name))
            if held is not None and held["metadata"]["uid"] == uid:
                _remove(self._children, owner_uid, (kind.name, name))
        return key

    def _place(self, kind: Kind, uid: str, body: Manifest) -> Key | None:
        metadata = body["metadata"]
        owner = controller_of(body) or {}
        if kind is INFERENCE_SERVICE:
            key, owner_uid = (metadata["namespace"], metadata["name"]), ""
            self._services[key] = body
        elif kind is POD and owner.get("kind") == "StatefulSet" and owner["name"] == metadata["labels"].get(GROUP_LABEL):
            key, owner_uid = (metadata["namespace"], metadata["labels"][SERVICE_LABEL]), ""
            pod = self._pods.setdefault(key, {})[uid] = read_pod(body)
            if not pod.scheduled:
                self._unplaced.add(uid)
        elif owner.get("kind") == INFERENCE_SERVICE.name:
            key, owner_uid = (metadata["namespace"], owner["name"]), owner["uid"]
            self._children.setdefault(owner_uid, {})[kind.name, metadata["name"]] = body
        else:
            return None
        self._where[uid] = (key, owner_uid)
        return key

    def _is_own(self, key: Key, pod: Pod) -> bool:
        """Of a StatefulSet that went before this operator came nobody knows whose it was; its pods drain."""
        held = self._where.get(pod.owner)
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
