"""Tells pods that a Secret with API keys has changed, so that their kubelets bring the new files at once.

A kubelet watches the Secrets of its pods, but writes a new one into their volumes only when it synchronizes a pod: every 60 to 90 s
by default, and when the pod changes. So pods that mount the Secret get its version as an annotation. That goes by way of their
status: it needs no right to change what a pod runs. A kubelet that sees the annotation before the Secret writes the old one again.
So the annotation changes once more, AGAIN_SECONDS later.

Several operators, each with a class of services, may list the same pods: each annotates those of its own services.

Secrets are listed by the names that the operator was given, and only their metadata. That costs a quiet cluster one request for
each name; a watch of each would cost as much as it begins again.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from starling_operator.cluster.kinds import GROUP, MANAGED, POD, ROUTER_LABEL, SECRET, SERVICE_LABEL
from starling_operator.cluster.kube import METADATA_LIST, Kube, KubeError
from starling_operator.cluster.lease import LeaseLost
from starling_operator.logs import Key
from starling_operator.plan.observed import Manifest

PERIOD, REFUSED_PERIOD = 2.0, 60.0
AGAIN_SECONDS = 5.0
"""Longer than a kubelet's watch of Secrets is behind, and short enough that a revoked key is refused within 10 s."""
ANNOTATION = f"{GROUP}/secrets"
"""Versions of the Secrets that a pod mounts, as they were when its kubelet was told, and AGAIN when it was told once more."""
AGAIN = ";again"
_AT_ONCE = 16
Versions = Mapping[tuple[str, str], str]
"""resourceVersion by namespace and name."""
log = logging.getLogger(__name__)


class SecretChanges:
    """Follows the Secrets with these names in all namespaces that are served. `services` returns the operator's own services."""

    def __init__(
        self, kube: Kube, names: Sequence[str], scopes: Sequence[str | None], services: Callable[[], Iterable[Key]]
    ) -> None:
        self._kube, self._names, self._scopes, self._services = kube, names, scopes, services
        self._versions: Versions | None = None
        self._behind: set[str] = set()
        """Namespaces with pods that may not know of the last change."""
        self._again: dict[str, float] = {}
        """Namespaces whose pods hear of it once more, and the time for that."""
        self._refused: dict[str, float] = {}
        """Namespaces whose pods this operator may not tell, and the time when it tries again."""

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            pause = await self.refresh()
            await asyncio.sleep(pause)

    async def refresh(self) -> float:
        """Tells the pods of all changes since the last time. Returns the seconds until the next."""
        try:
            versions = await self._list()
            # What changed before the first look is not known.
            served = {namespace for namespace, _ in self._services()}
            changed = served if self._versions is None else served & _changed(self._versions, versions)
            self._behind, self._versions = self._behind | changed, versions
            now = time.monotonic()
            due = self._behind | {namespace for namespace, at in self._again.items() if at <= now}
            for namespace in sorted(due):
                if self._refused.get(namespace, now) <= now:
                    await self._annotate_those_of(namespace, versions)
        except LeaseLost as lost:
            log.warning("no pod is told of new keys: %s", lost)
        except KubeError as error:
            if error.status == 403:
                log.info("a key that is revoked is refused when kubelets look at its Secret by themselves: %s", error)
                return REFUSED_PERIOD
            log.warning("Secrets with API keys cannot be followed: %s", error)
        return PERIOD

    async def _annotate_those_of(self, namespace: str, versions: Versions) -> None:
        """Tells the pods of a namespace. If that is refused the next try is later, and others do not wait for it."""
        is_first = namespace in self._behind
        try:
            if await self._annotate_all(namespace, versions, again=not is_first):
                self._behind.discard(namespace)
                self._again.pop(namespace, None)
                if is_first:
                    self._again[namespace] = time.monotonic() + AGAIN_SECONDS
        except KubeError as error:
            log.warning("pods in %s are not told of new keys: %s", namespace, error)
            if error.status == 403:
                self._refused[namespace] = time.monotonic() + REFUSED_PERIOD

    async def _list(self) -> Versions:
        found = {}
        for scope in self._scopes:
            for name in self._names:
                query = {"fieldSelector": f"metadata.name={name}", "resourceVersion": "0"}
                answer = await self._kube.get(SECRET.path(scope), query, accept=METADATA_LIST)
                for item in answer["items"] or ():
                    found[item["metadata"]["namespace"], name] = item["metadata"]["resourceVersion"]
        return found

    async def _annotate_all(self, namespace: str, versions: Versions, *, again: bool) -> bool:
        """Returns whether all pods there know the versions that they are to have."""
        answer = await self._kube.get(POD.path(namespace), {"labelSelector": MANAGED})
        own = set(self._services())
        texts = {
            pod["metadata"]["name"]: (_annotation(pod), text)
            for pod in answer["items"] or ()
            if _service_of(pod) in own and (text := self._of_pod(pod, versions))
        }
        if again:
            outdated = {name: text + AGAIN for name, (noted, text) in texts.items() if noted != text + AGAIN}
        else:
            outdated = {name: text for name, (noted, text) in texts.items() if noted.removesuffix(AGAIN) != text}
        limit = asyncio.Semaphore(_AT_ONCE)

        async def annotate(name: str, text: str) -> bool:
            async with limit:
                return await self._annotate(namespace, name, text)

        return all(await asyncio.gather(*(annotate(name, text) for name, text in outdated.items())))

    def _of_pod(self, pod: Manifest, versions: Versions) -> str:
        """Returns the annotation of a pod; "" for one that mounts none of the Secrets."""
        mounted, namespace = _mounted(pod), pod["metadata"]["namespace"]
        return ",".join(f"{name}={versions.get((namespace, name), '')}" for name in self._names if name in mounted)

    async def _annotate(self, namespace: str, pod: str, text: str) -> bool:
        try:
            await self._kube.annotate(POD.path(namespace, pod, "status"), {ANNOTATION: text})
        except KubeError as error:
            if error.status == 404:
                return True
            if error.status == 403:
                raise
            log.warning("pod %s/%s is not told of its new keys: %s", namespace, pod, error)
            return False
        log.info("pod %s/%s %s", namespace, pod, "is told once more of its keys" if text.endswith(AGAIN) else "gets its new keys")
        return True


def _changed(before: Versions, now: Versions) -> set[str]:
    """Returns the namespaces of Secrets that came, went or changed."""
    return {namespace for (namespace, _), _ in before.items() ^ now.items()}


def _service_of(pod: Manifest) -> Key:
    """Returns the service whose agent or router a pod is; its name is "" for one that is neither."""
    labels = pod["metadata"].get("labels") or {}
    return pod["metadata"]["namespace"], labels.get(SERVICE_LABEL) or labels.get(ROUTER_LABEL) or ""


def _annotation(pod: Manifest) -> str:
    return str((pod["metadata"].get("annotations") or {}).get(ANNOTATION, ""))


def _mounted(pod: Manifest) -> set[str]:
    """Returns the names of the Secrets that are in a pod's volumes."""
    volumes = pod["spec"].get("volumes") or ()
    sources = [source for volume in volumes for source in (volume.get("projected") or {}).get("sources") or ()]
    plain = {volume["secret"]["secretName"] for volume in volumes if "secret" in volume}
    return plain | {source["secret"]["name"] for source in sources if "secret" in source}
