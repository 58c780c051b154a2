"""Carries a decision out: create, apply, delete, in this order. An object that is already as wanted costs no request."""

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from starling_operator.apply.foreign_fields import foreign_paths, lacks_foreign_fields
from starling_operator.apply.refusals import WriteRefusal, WriteRefusals
from starling_operator.cluster.kinds import BY_NAME, MANAGER, SECRET, SERVICE_MONITOR, Kind
from starling_operator.cluster.kube import Kube, KubeError
from starling_operator.logs import Key, about
from starling_operator.plan.canary_notice import is_notice
from starling_operator.plan.decision import Decision, Delete
from starling_operator.plan.observed import Manifest, Service
from starling_operator.watch.cache import Cache, controller_of
from starling_operator.watch.is_applied import AppliedObjects, is_applied
from starling_operator.watch.ownership import Ownership

CREATE_AGAIN = 10.0
"""Seconds after which a Secret that pods wait for is created again, in case somebody deleted it."""
log = logging.getLogger(__name__)


@dataclass
class Outcome:
    """wrote: something was changed. errors: refusals of the API server, for the status. retry_after: seconds until the next try."""

    wrote: bool = False
    errors: list[str] = field(default_factory=list)
    retry_after: float | None = None


class Applier:
    """Writes children, and puts the answers into the cache for the next decision. `has` returns whether the cluster has a kind."""

    def __init__(self, kube: Kube, cache: Cache, has: Callable[[Kind], Awaitable[bool]]) -> None:
        self._kube, self._has = kube, has
        self._cache = cache
        self._applied = AppliedObjects()
        self._ownership = Ownership()
        self._refusals, self._undeleted = WriteRefusals(), WriteRefusals()
        self._created: dict[Key, dict[str, float]] = {}

    async def carry_out(self, service: Service, decision: Decision) -> Outcome:
        """Writes and deletes the other children even where one is refused; other failures raise."""
        outcome = Outcome()
        self._refusals.retain((service.namespace, service.name), (*decision.create, *decision.apply))
        self._undeleted.retain((service.namespace, service.name), map(_request, decision.delete))
        for manifest in decision.create:
            if BY_NAME[manifest["kind"]] is SECRET:
                await self._create_secret(service, manifest, outcome)
            elif self._live(service, manifest) is None:
                await self._try_write(service, manifest, outcome, create_only=True)
        for manifest in decision.apply:
            if not self._is_as_wanted(self._live(service, manifest), manifest):
                await self._try_write(service, manifest, outcome, create_only=False)
        for deletion in decision.delete:
            await self._try_delete(service, deletion, outcome)
        return outcome

    def refused(self, key: Key) -> frozenset[str]:
        """Returns names of children that are wanted and refused."""
        return self._refusals.reported(key)

    def forget(self, key: Key) -> None:
        self._refusals.forget(key)
        self._undeleted.forget(key)
        self._created.pop(key, None)

    def _live(self, service: Service, manifest: Manifest) -> Manifest | None:
        return self._cache.children(service.uid).get((manifest["kind"], manifest["metadata"]["name"]))

    def _is_as_wanted(self, live: Manifest | None, manifest: Manifest) -> bool:
        return live is not None and (self._matches(live, manifest) or self._applied.knows(live, manifest))

    def _matches(self, live: Manifest, manifest: Manifest) -> bool:
        return (
            is_applied(live, manifest)
            and lacks_foreign_fields(live, manifest)
            and not self._ownership.has_leftover_fields(live, manifest)
        )

    async def _create_secret(self, service: Service, manifest: Manifest, outcome: Outcome) -> None:
        """Creates a Secret every CREATE_AGAIN seconds while pods need it: Secrets are never read, so it may have been deleted."""
        key, name = (service.namespace, service.name), manifest["metadata"]["name"]
        created = self._created.setdefault(key, {})
        left = created[name] + CREATE_AGAIN - time.monotonic() if name in created else 0.0
        if left <= 0.0:
            # Where a ResourceQuota is used up it rejects the request first, even if the Secret exists. That is not reported.
            reported = Outcome() if name in created else outcome
            if not await self._try_write(service, manifest, reported, create_only=True):
                return
            created[name], left = time.monotonic(), CREATE_AGAIN
        outcome.retry_after = min(outcome.retry_after or left, left)

    async def _try_write(self, service: Service, manifest: Manifest, outcome: Outcome, create_only: bool) -> bool:
        """Returns whether the object is written. A refused one is sent again when its manifest changed or its backoff is over."""
        key = (service.namespace, service.name)
        refused = self._refusals.in_backoff(key, manifest)
        if refused is None:
            try:
                await self._write(service, manifest, create_only)
                outcome.wrote = True
                self._refusals.clear(key, manifest)
                return True
            except KubeError as failed:
                error = await self._refusal_behind(failed, manifest)
                if not error.is_permanent and error.status != 500:
                    raise
                if error.status == 404 and not await self._has(BY_NAME[manifest["kind"]]):
                    if manifest["kind"] == SERVICE_MONITOR.name:
                        return False  # No spec asks for it, and its CRD was removed a moment ago.
                    error = KubeError(404, error.reason, f"the cluster has no {manifest['kind']}: its CRD is not installed")
                refused = self._refusals.add(key, manifest, error.message, transient=not error.is_permanent)
                log.warning("%s %s is refused: %s", *_kind_and_name(manifest), error, extra=about(key))
        _report(outcome, manifest, refused, shown=not is_notice(manifest))
        return False

    async def _try_delete(self, service: Service, deletion: Delete, outcome: Outcome) -> None:
        """Tries a refused deletion again when its backoff is over, as a webhook may refuse it for good."""
        key, request = (service.namespace, service.name), _request(deletion)
        refused = self._undeleted.in_backoff(key, request)
        if refused is None:
            try:
                await self._delete(service, deletion)
            except KubeError as error:
                if not error.is_permanent and error.status != 500:
                    raise
                message = f"cannot be deleted: {error.message}"
                refused = self._undeleted.add(key, request, message, transient=not error.is_permanent)
                log.warning("the deletion of %s %s is refused: %s", deletion.kind, deletion.name, error, extra=about(key))
            else:
                outcome.wrote = True
                self._undeleted.clear(key, request)
                return
        _report(outcome, request, refused)

    async def _write(self, service: Service, manifest: Manifest, create_only: bool) -> None:
        kind, live = BY_NAME[manifest["kind"]], self._live(service, manifest)
        if create_only:
            written = await self._create(service, kind, manifest)
        elif live is None:
            written = await self._apply_first(service, kind, manifest)
        else:
            written = await self._apply_again(kind, manifest, live)
            foreign = foreign_paths(written, manifest)
            if foreign:
                log.info("%s %s: removing foreign fields: %s", *_kind_and_name(manifest), ", ".join(foreign))
                written = await self._kube.remove(kind.path(service.namespace, manifest["metadata"]["name"]), foreign, written)
        if kind is SECRET:
            return
        self._cache.put(kind, written)
        live = self._live(service, manifest)
        if not create_only and live is not None and not self._matches(live, manifest):
            self._applied.remember(live, manifest)

    async def _refusal_behind(self, failed: KubeError, manifest: Manifest) -> KubeError:
        """Returns the refusal behind a status 500, where a dry run of the same object shows that it is invalid; else `failed`."""
        kind, metadata = BY_NAME[manifest["kind"]], manifest["metadata"]
        if failed.status == 500:
            try:
                await self._kube.dry_run(kind.path(metadata["namespace"]), manifest)
            except KubeError as refused:
                return refused if refused.status in (400, 422) else failed
        return failed

    async def _create(self, service: Service, kind: Kind, manifest: Manifest) -> Manifest:
        """Creates an object that never changes. An existing one must be ours. A Secret's name proves that: it has a digest."""
        try:
            return await self._kube.create(kind.path(service.namespace), manifest)
        except KubeError as error:
            if error.reason != "AlreadyExists":
                raise
            return manifest if kind is SECRET else await self._existing(service, kind, manifest)

    async def _apply_first(self, service: Service, kind: Kind, manifest: Manifest) -> Manifest:
        """Applies without overwriting: with a resourceVersion that no object has, an existing one is a conflict."""
        try:
            return await self._apply(kind, manifest, {"resourceVersion": "1"})
        except KubeError as error:
            if error.status != 409:
                raise
        found = await self._existing(service, kind, manifest)
        return await self._apply(kind, manifest, {"uid": found["metadata"]["uid"]})

    async def _apply(self, kind: Kind, manifest: Manifest, precondition: dict[str, str]) -> Manifest:
        metadata = manifest["metadata"]
        body = {**manifest, "metadata": {**metadata, **precondition}}
        return await self._kube.apply(kind.path(metadata["namespace"], metadata["name"]), body)

    async def _apply_again(self, kind: Kind, manifest: Manifest, live: Manifest) -> Manifest:
        """Applies to the object that was seen, and to no other. If that is gone, the next reconcile sees it."""
        try:
            return await self._apply(kind, manifest, {"uid": live["metadata"]["uid"]})
        except KubeError as error:
            if error.status == 409:
                self._cache.drop(live["metadata"]["uid"])
            raise

    async def _existing(self, service: Service, kind: Kind, manifest: Manifest) -> Manifest:
        """Returns the object that has the name. Raises when it belongs to somebody else: objects of others are never adopted."""
        name = manifest["metadata"]["name"]
        found = await self._kube.get(kind.path(service.namespace, name))
        owner = controller_of(found)
        if owner is None and any(field["manager"] == MANAGER for field in found["metadata"].get("managedFields", ())):
            return found
        if owner is None or owner["uid"] != service.uid:
            raise KubeError(409, "AlreadyExists", f"exists and belongs to {_owner_text(owner)}; rename the service or remove it")
        return found

    async def _delete(self, service: Service, deletion: Delete) -> None:
        """Deletes an object. It is no failure if that is gone already, or replaced by another of that name."""
        kind = BY_NAME[deletion.kind]
        options: Manifest = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": deletion.uid},
            "propagationPolicy": "Background",
        }
        if deletion.grace_seconds is not None:
            options["gracePeriodSeconds"] = deletion.grace_seconds
        log.info("deleting %s %s: %s", kind.name, deletion.name, deletion.why, extra=about((service.namespace, service.name)))
        try:
            left = await self._kube.delete(kind.path(service.namespace, deletion.name), options)
        except KubeError as error:
            if error.status not in (404, 409):
                raise
            left = {}
        if "deletionTimestamp" in left.get("metadata", {}) and left["metadata"].get("uid") == deletion.uid:
            self._cache.put(kind, left)
        else:
            self._cache.drop(deletion.uid)
        self._applied.forget(deletion.uid)
        self._ownership.forget(deletion.uid)


def _request(deletion: Delete) -> Manifest:
    """Returns what tells a deletion from another one of the same object."""
    return {"kind": deletion.kind, "metadata": {"name": deletion.name, "uid": deletion.uid}, "grace": deletion.grace_seconds}


def _report(outcome: Outcome, manifest: Manifest, refused: WriteRefusal, *, shown: bool = True) -> None:
    if refused.is_reported and shown:
        outcome.errors.append(f"{manifest['kind']} {manifest['metadata']['name']}: {refused.message}")
    outcome.retry_after = min(outcome.retry_after or refused.seconds_left, refused.seconds_left)


def _kind_and_name(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def _owner_text(owner: Manifest | None) -> str:
    return "nobody" if owner is None else f"{owner['kind']} {owner['name']} ({owner['uid']})"
