"""Requests to the API server, by the official client with plain paths and plain dicts.

Every write passes the fence first: when the Lease may be another's, nothing more is written. A write may take no longer than the
Lease is surely ours.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiohttp import ClientError
from kubernetes.aio import config
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from starling_operator import metrics
from starling_operator.cluster.kinds import MANAGER, Kind
from starling_operator.plan.observed import Manifest

READ_SECONDS = 30.0
APPLY, JSON_PATCH, JSON = "application/apply-patch+yaml", "application/json-patch+json", "application/json"
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"


class KubeError(Exception):
    """The API server refused, in its own words. status 0: it could not be reached."""

    def __init__(self, status: int, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(f"{reason or status}: {message}")
        self.status, self.reason, self.message, self.retry_after = status, reason, message, retry_after

    @property
    def is_users(self) -> bool:
        """What was asked for is refused and will be refused again: invalid, over quota, against Pod Security, ..."""
        return self.status in (400, 403, 404, 405, 413, 422) or (self.status == 409 and self.reason == "AlreadyExists")


class Kube:
    """`fence` raises when nothing may be written, else gives the seconds for which writing is allowed."""

    def __init__(self, client: ApiClient, fence: Callable[[], float]) -> None:
        self._client = client
        self._fence = fence

    async def get(self, path: str, query: Mapping[str, str] | None = None, accept: str = JSON) -> Manifest:
        return await self.request("GET", path, query, accept=accept, seconds=READ_SECONDS)

    async def create(self, path: str, body: Manifest) -> Manifest:
        metrics.API_WRITES.labels("create").inc()
        return await self.request("POST", path, {"fieldManager": MANAGER}, body, seconds=self._fence())

    async def apply(self, path: str, body: Manifest) -> Manifest:
        """Server-side apply: what the body holds becomes ours; what we applied before and it does not hold goes."""
        metrics.API_WRITES.labels("apply").inc()
        query = {"fieldManager": MANAGER, "force": "true"}
        return await self.request("PATCH", path, query, body, content=APPLY, seconds=self._fence())

    async def judge(self, path: str, body: Manifest) -> None:
        """Raises what the API server says of `body` as a new object, by its strictest reading, and writes nothing.

        A server-side apply of a field that does not exist, or of a malformed quantity, is answered with an internal error.
        """
        query = {"dryRun": "All", "fieldValidation": "Strict", "fieldManager": MANAGER}
        await self.request("POST", path, query, body, seconds=READ_SECONDS)

    async def remove(self, path: str, pointers: Sequence[str], seen: Manifest) -> Manifest:
        """Parts of an object, by JSON pointers, in this order; only of the version that was seen. What is removed nobody owns."""
        metrics.API_WRITES.labels("patch").inc()
        version = {"op": "replace", "path": "/metadata/resourceVersion", "value": seen["metadata"]["resourceVersion"]}
        body = [version, *({"op": "remove", "path": pointer} for pointer in pointers)]
        return await self.request("PATCH", path, {"fieldManager": MANAGER}, body, content=JSON_PATCH, seconds=self._fence())

    async def delete(self, path: str, options: Manifest) -> Manifest:
        metrics.API_WRITES.labels("delete").inc()
        return await self.request("DELETE", path, None, options, seconds=self._fence())

    async def exists(self, kind: Kind) -> bool:
        """Whether the cluster has the kind."""
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
        """Raises ApiError. Goes past the fence: only the Lease and the operator's key are written this way from outside."""
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
    """With the pod's service account inside a cluster, else as the kubeconfig says ($KUBECONFIG, ~/.kube/config)."""
    configuration = Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except config.ConfigException:
        await config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    return ApiClient(configuration)


def _refusal(status: int, data: bytes, retry_after: str | None) -> KubeError:
    try:
        said: dict[str, Any] = json.loads(data)
    except ValueError:
        said = {"message": data.decode(errors="replace").strip()[:500]}
    seconds = float(retry_after) if retry_after and retry_after.isdigit() else None
    return KubeError(status, said.get("reason") or "", said.get("message") or "", seconds)
