"""Requests to the API server, by the official client with plain paths and plain dicts.

Every write passes the fence first: when another operator may hold the Lease, nothing more is written. A write may take no longer
than the Lease is certainly ours.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from aiohttp import ClientError
from kubernetes.aio import config
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from starling_operator import metrics
from starling_operator.cluster.kinds import MANAGER, Kind
from starling_operator.plan.observed import Manifest

READ_SECONDS = 30.0
APPLY, JSON_PATCH, JSON = "application/apply-patch+yaml", "application/json-patch+json", "application/json"
MERGE_PATCH = "application/merge-patch+json"
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"


class KubeError(Exception):
    """A refusal of the API server, in its own words. status 0: it could not be reached."""

    def __init__(self, status: int, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(f"{reason or status}: {message}")
        self.status, self.reason, self.message, self.retry_after = status, reason, message, retry_after

    @property
    def is_permanent(self) -> bool:
        """True if the same request would be refused again: invalid, over quota, against Pod Security, ..."""
        return self.status in (400, 403, 404, 405, 413, 422) or (self.status == 409 and self.reason == "AlreadyExists")


class Kube:
    """Client of the API server. `fence` returns the seconds for which writing is allowed, and raises when it is not."""

    def __init__(self, client: ApiClient, fence: Callable[[], float]) -> None:
        self._client = client
        self._fence = fence

    async def get(self, path: str, query: Mapping[str, str] | None = None, accept: str = JSON) -> Manifest:
        return await self.request("GET", path, query, accept=accept, seconds=READ_SECONDS)

    async def create(self, path: str, body: Manifest) -> Manifest:
        metrics.API_WRITES.labels("create").inc()
        return await self.request("POST", path, {"fieldManager": MANAGER}, body, seconds=self._fence())

    async def apply(self, path: str, body: Manifest) -> Manifest:
        """Applies on the server's side: the body's fields become ours; those that we applied before and it lacks are removed."""
        metrics.API_WRITES.labels("apply").inc()
        query = {"fieldManager": MANAGER, "force": "true"}
        return await self.request("PATCH", path, query, body, content=APPLY, seconds=self._fence())

    async def dry_run(self, path: str, body: Manifest) -> None:
        """Creates `body` as a dry run with strict validation, and raises the refusal.

        To a server-side apply of an unknown field, or of a malformed quantity, the API server answers with an internal error.
        """
        query = {"dryRun": "All", "fieldValidation": "Strict", "fieldManager": MANAGER}
        await self.request("POST", path, query, body, seconds=READ_SECONDS)

    async def remove(self, path: str, pointers: Sequence[str], seen: Manifest) -> Manifest:
        """Removes fields by JSON pointers, in this order, and only from the version that was seen. Nobody owns them then."""
        metrics.API_WRITES.labels("patch").inc()
        version = {"op": "replace", "path": "/metadata/resourceVersion", "value": seen["metadata"]["resourceVersion"]}
        body = [version, *({"op": "remove", "path": pointer} for pointer in pointers)]
        return await self.request("PATCH", path, {"fieldManager": MANAGER}, body, content=JSON_PATCH, seconds=self._fence())

    async def annotate(self, path: str, annotations: Mapping[str, str]) -> None:
        """Sets these annotations, and leaves all else as it is."""
        metrics.API_WRITES.labels("patch").inc()
        body: Manifest = {"metadata": {"annotations": dict(annotations)}}
        await self.request("PATCH", path, {"fieldManager": MANAGER}, body, content=MERGE_PATCH, seconds=self._fence())

    async def delete(self, path: str, options: Manifest) -> Manifest:
        metrics.API_WRITES.labels("delete").inc()
        return await self.request("DELETE", path, None, options, seconds=self._fence())

    async def exists(self, kind: Kind) -> bool:
        """Returns whether the cluster has the kind."""
        try:
            listing = await self.get(f"/apis/{kind.api_version}")
        except KubeError as error:
            if error.status == 404:
                return False
            raise
        return any(resource["name"] == kind.plural for resource in listing["resources"])

    async def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Manifest | list[Manifest] | None = None,
        *,
        content: str = JSON,
        accept: str = JSON,
        seconds: float,
    ) -> Manifest:
        """Raises KubeError. Bypasses the fence: of other modules only the Lease and the operator's key write with it."""
        headers = {"Accept": accept, "Content-Type": content}
        method, url, headers, _, _ = await self._client.param_serialize(
            method, path, query_params=dict(query or {}), header_params=headers, auth_settings=["BearerToken"]
        )
        try:
            response = await self._client.call_api(method, url, headers, body, _request_timeout=seconds)
            data = await response.read()  # type: ignore[no-untyped-call]
        except (TimeoutError, ClientError, OSError) as error:
            raise KubeError(0, "Unreachable", f"{method} {path}: {error or type(error).__name__}") from error
        if response.status >= 400:
            raise _refusal(response.status, data, response.headers.get("Retry-After"))
        answer: Manifest = json.loads(data)
        return answer

    async def close(self) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]


async def connect() -> ApiClient:
    """Connects with the pod's service account inside a cluster, else by the kubeconfig ($KUBECONFIG, ~/.kube/config)."""
    configuration = Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except config.ConfigException:
        await config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    # The client's own look-up of the environment's proxies goes to a thread with each request.
    configuration.proxy = configuration.proxy or _environments_proxy(configuration.host)
    configuration.client_session_kwargs = {"trust_env": False}
    return ApiClient(configuration)


def _environments_proxy(url: str) -> str | None:
    """Returns the proxy that the environment names for a URL (HTTPS_PROXY, NO_PROXY)."""
    parts = urlsplit(url)
    return None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)


def _refusal(status: int, data: bytes, retry_after: str | None) -> KubeError:
    try:
        status_object: dict[str, Any] = json.loads(data)
    except ValueError:
        status_object = {"message": data.decode(errors="replace").strip()[:500]}
    seconds = float(retry_after) if retry_after and retry_after.isdigit() else None
    return KubeError(status, status_object.get("reason") or "", status_object.get("message") or "", seconds)
