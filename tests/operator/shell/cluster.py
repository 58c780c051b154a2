"""The API server as a test uses it: plain dicts, and waiting."""

import asyncio
import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.waiting import until

Manifest = dict[str, Any]
APPLY, MERGE = "application/apply-patch+yaml", "application/merge-patch+json"
SERVICES = "/apis/serving.starling.dev/v1alpha1/namespaces/{}/inferenceservices"
SCALES = "/apis/serving.starling.dev/v1alpha1/namespaces/{}/parallelismscales"
CHILD_PATHS = {
    "ParallelismScale": SCALES,
    "StatefulSet": "/apis/apps/v1/namespaces/{}/statefulsets",
    "Deployment": "/apis/apps/v1/namespaces/{}/deployments",
    "ControllerRevision": "/apis/apps/v1/namespaces/{}/controllerrevisions",
    "Service": "/api/v1/namespaces/{}/services",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "Secret": "/api/v1/namespaces/{}/secrets",
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
}
PODS = "/api/v1/namespaces/{}/pods"


class Refused(Exception):
    """The API server's answer was an error."""

    def __init__(self, status: int, body: Manifest) -> None:
        super().__init__(f"{status}: {body.get('message', body)}")
        self.status = status


@contextmanager
def tolerating_errors(who: str) -> Iterator[None]:
    """Prints errors of a starved API server, for a caller that tries again in its next turn."""
    try:
        yield
    except (Refused, aiohttp.ClientError, TimeoutError) as error:
        print(f"{who}: {error!r}")


@dataclass(frozen=True)
class Access:
    """Content of an administrator's kubeconfig."""

    url: str
    token: str
    ssl: ssl.SSLContext

    @classmethod
    def of(cls, kubeconfig: Path) -> "Access":
        # The harness writes JSON, which is YAML too; another cluster's file needs the slower reader.
        text = kubeconfig.read_text()
        read = json.loads(text) if text.startswith("{") else _yaml(text)
        cluster, user = read["clusters"][0]["cluster"], read["users"][0]["user"]
        context = ssl.create_default_context(cadata=_decoded(cluster["certificate-authority-data"]))
        return cls(cluster["server"], user["token"], context)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}


class Cluster:
    """An administrator's client. `namespace` is the test's own."""

    def __init__(self, access: Access, session: aiohttp.ClientSession, namespace: str) -> None:
        self.access, self._session, self.namespace = access, session, namespace

    async def call(self, method: str, path: str, body: Any = None, content: str = "application/json", **query: str) -> Manifest:
        """Returns the answer; raises Refused.

        A caller that is cancelled leaves the request to the session. If the request were cancelled too, its TLS connection would be
        open until the API server closes it, maybe longer than the event loop.
        """
        return await asyncio.shield(self._call(method, path, body, content, query))

    async def _call(self, method: str, path: str, body: Any, content: str, query: dict[str, str]) -> Manifest:
        headers = {**self.access.headers, "Content-Type": content}
        data = None if body is None else json.dumps(body)
        url = self.access.url + path
        async with self._session.request(method, url, params=query, headers=headers, data=data, ssl=self.access.ssl) as response:
            text = await response.text()
            found: Manifest = json.loads(text) if text.startswith("{") else {"message": text}
            if response.status >= 400:
                raise Refused(response.status, found)
            return found

    async def apply(self, body: Manifest, path: str = SERVICES) -> Manifest:
        where = f"{path.format(self.namespace)}/{body['metadata']['name']}"
        return await self.call("PATCH", where, body, APPLY, fieldManager="tests", force="true")

    async def merge(self, path: str, body: Manifest) -> Manifest:
        return await self.call("PATCH", path, body, MERGE)

    async def service(self, name: str) -> Manifest:
        return await self.call("GET", f"{SERVICES.format(self.namespace)}/{name}")

    async def edit(self, name: str, spec: Manifest) -> Manifest:
        return await self.merge(f"{SERVICES.format(self.namespace)}/{name}", {"spec": spec})

    async def delete(self, path: str) -> None:
        await self.call("DELETE", path)

    async def quota(self, hard: dict[str, str]) -> str:
        """Creates a quota, and returns its path when it is in force."""
        quotas = f"/api/v1/namespaces/{self.namespace}/resourcequotas"
        body = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": hard}}
        await self.apply(body, quotas)

        async def is_counted() -> bool:
            return "used" in (await self.call("GET", f"{quotas}/few")).get("status", {})

        await until(is_counted, "the quota to be in force")
        return f"{quotas}/few"

    async def pods(self, **query: str) -> list[Manifest]:
        return list((await self.call("GET", PODS.format(self.namespace), **query))["items"])

    async def children(self) -> dict[tuple[str, str], Manifest]:
        """Returns all objects in the namespace that an InferenceService owns."""
        found = {}
        for kind, path in CHILD_PATHS.items():
            for item in (await self.call("GET", path.format(self.namespace)))["items"]:
                if any(owner["kind"] == "InferenceService" for owner in item["metadata"].get("ownerReferences", ())):
                    found[kind, item["metadata"]["name"]] = item
        return found

    async def children_names(self) -> list[str]:
        return [f"{kind} {name} {child['metadata']['uid']}" for (kind, name), child in (await self.children()).items()]

    async def condition(self, name: str, kind: str) -> Manifest:
        conditions = (await self.service(name)).get("status", {}).get("conditions", [])
        return next((each for each in conditions if each["type"] == kind), {"status": None, "reason": None, "message": ""})

    async def ready(self, name: str, seconds: float = 90.0) -> None:
        """Waits until the service is ready at its present generation."""
        await until(lambda: self.is_ready(name), f"{name} to be ready", seconds, lambda: self.service(name))

    async def is_ready(self, name: str) -> bool:
        body = await self.service(name)
        conditions = {each["type"]: each for each in body.get("status", {}).get("conditions", [])}
        found = conditions.get("Ready", {})
        return found.get("status") == "True" and found.get("observedGeneration") == body["metadata"]["generation"]


def manifest(name: str = "chat", **spec: Any) -> Manifest:
    """A small service."""
    return {
        "apiVersion": "serving.starling.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {"model": {"source": "file:///models/tiny"}, **spec},
    }


def _decoded(text: str) -> str:
    import base64

    return base64.b64decode(text).decode()


def _yaml(text: str) -> Manifest:
    import yaml

    read: Manifest = yaml.safe_load(text)
    return read
