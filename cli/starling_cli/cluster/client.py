"""A cluster as the commands see it: objects as plain dictionaries in, errors with a cause and a fix out.

The official client takes most of a second to import, so it is imported when a connection is made and not before.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GROUP, VERSION, PLURAL = "serving.starling.dev", "v1alpha1", "inferenceservices"
SCALE_PLURAL = "parallelismscales"
CRD_NAME = f"{PLURAL}.{GROUP}"
SERVICE_LABEL, GROUP_LABEL, NODE_LABEL, ROLE_LABEL = (f"{GROUP}/{name}" for name in ("service", "group", "node", "role"))
OPERATOR_SELECTOR = "app.kubernetes.io/name=starling-operator"
INSTALL_CRD = "install it: `starling crds | kubectl apply --server-side -f -`"
TIMEOUT_SECONDS = 20.0
BUSY_TRIES = 5
"""Tries of a call that the API server wants repeated after a while."""
_IN_CLUSTER_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

Object = dict[str, Any]


class ClusterError(Exception):
    """A call failed. `status` is the HTTP status, 0 where the API server was not reached."""

    def __init__(self, cause: str, fix: str, status: int = 0) -> None:
        super().__init__(cause)
        self.fix = fix
        self.status = status


@dataclass(frozen=True)
class Access:
    """Choice of a cluster by flags; None takes what kubectl would take."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None

    @property
    def is_configured(self) -> bool:
        """True while there is anything to connect to at all."""
        files = [self.kubeconfig] if self.kubeconfig else _default_files()
        return any(file.exists() for file in files) or "KUBERNETES_SERVICE_HOST" in os.environ


class Cluster:
    """One connection. Every method raises ClusterError."""

    def __init__(self, access: Access) -> None:
        from kubernetes import client

        self.api, default = _connect(access)
        self.namespace = access.namespace or default
        self.core: Any = client.CoreV1Api(self.api)
        self._custom: Any = client.CustomObjectsApi(self.api)

    def plain(self, answer: Any) -> Any:
        """Returns the client's answer as plain values, as the API server wrote it."""
        return self.api.sanitize_for_serialization(answer)

    def version(self) -> Object:
        from kubernetes import client

        with mapped_errors("version"):
            return dict(self.plain(client.VersionApi(self.api).get_code(_request_timeout=TIMEOUT_SECONDS)))

    def services(self) -> list[Object]:
        try:
            return self.list_of(GROUP, VERSION, PLURAL)
        except ClusterError as error:
            if error.status == 404:
                raise ClusterError("the cluster knows no InferenceServices: the CRD is not installed", INSTALL_CRD, 404) from None
            raise

    def service(self, name: str) -> Object:
        try:
            with mapped_errors(f"InferenceService {name!r}"):
                return dict(
                    self._custom.get_namespaced_custom_object(
                        GROUP, VERSION, self.namespace, PLURAL, name, _request_timeout=TIMEOUT_SECONDS
                    )
                )
        except ClusterError as error:
            if error.status == 404:
                raise self._no_service(name, error) from None
            raise

    def _no_service(self, name: str, error: ClusterError) -> ClusterError:
        try:
            others = ", ".join(found["metadata"]["name"] for found in self.services()) or "none"
        except ClusterError as why:
            return why if why.status == 404 else error
        return ClusterError(f"namespace {self.namespace!r} has no InferenceService {name!r}; it has: {others}", "see -n", 404)

    def scale(self, name: str, replicas: int) -> None:
        """Sets the groups through the scale subresource, as `kubectl scale` and autoscalers do."""
        self.service(name)
        with mapped_errors(f"scale of InferenceService {name!r}"):
            self._custom.patch_namespaced_custom_object_scale(
                GROUP, VERSION, self.namespace, PLURAL, name, {"spec": {"replicas": replicas}}, _request_timeout=TIMEOUT_SECONDS
            )

    def list_of(self, group: str, version: str, plural: str, selector: str = "") -> list[Object]:
        """Returns objects of any kind outside the core group, in the namespace."""
        with mapped_errors(f"{plural} in namespace {self.namespace!r}"):
            answer = self._custom.list_namespaced_custom_object(
                group, version, self.namespace, plural, label_selector=selector, _request_timeout=TIMEOUT_SECONDS
            )
        return list(answer["items"])

    def knows(self, group: str, version: str, plural: str) -> bool:
        """Returns whether the cluster has the kind."""
        try:
            self.list_of(group, version, plural)
        except ClusterError as error:
            if error.status == 404:
                return False
            raise
        return True

    def list_everywhere(self, group: str, version: str, plural: str, selector: str = "") -> list[Object]:
        """Returns objects of any kind outside the core group, of the whole cluster."""
        with mapped_errors(plural):
            answer = self._custom.list_cluster_custom_object(
                group, version, plural, label_selector=selector, _request_timeout=TIMEOUT_SECONDS
            )
        return list(answer["items"])

    def core_list(self, plural: str, selector: str = "", fields: str = "") -> list[Object]:
        """Returns namespaced objects of the core group: pod, service, config_map, secret, event, ..."""
        call = getattr(self.core, f"list_namespaced_{plural}")
        with mapped_errors(f"{plural}s in namespace {self.namespace!r}"):
            answer = call(self.namespace, label_selector=selector, field_selector=fields, _request_timeout=TIMEOUT_SECONDS)
        return list(self.plain(answer)["items"])

    def nodes(self) -> list[Object]:
        with mapped_errors("nodes"):
            return list(self.plain(self.core.list_node(_request_timeout=TIMEOUT_SECONDS))["items"])

    def namespace_labels(self) -> dict[str, str]:
        with mapped_errors(f"namespace {self.namespace!r}"):
            found = self.plain(self.core.read_namespace(self.namespace, _request_timeout=TIMEOUT_SECONDS))
        return dict(found["metadata"].get("labels") or {})

    def is_allowed(self, verb: str, group: str, resource: str, namespace: str | None) -> bool:
        """Returns whether these credentials have a right; namespace None is the whole cluster."""
        from kubernetes import client

        plain, _, subresource = resource.partition("/")
        attributes = {"verb": verb, "group": group, "resource": plain, "subresource": subresource, "namespace": namespace or ""}
        rights: Any = client.AuthorizationV1Api(self.api)
        with mapped_errors("rights"):
            answer = rights.create_self_subject_access_review(
                {"spec": {"resourceAttributes": attributes}}, _request_timeout=TIMEOUT_SECONDS
            )
        return bool(answer.status.allowed)

    def pods(self, service: str) -> list[Object]:
        return self.core_list("pod", f"{SERVICE_LABEL}={service}")

    def logs(
        self, pod: str, lines: int, previous: bool = False, namespace: str | None = None, container: str | None = "agent"
    ) -> str:
        with mapped_errors(f"logs of pod {pod!r}"):
            more = {"container": container} if container else {}
            answer = self.core.read_namespaced_pod_log(
                pod, namespace or self.namespace, tail_lines=lines, previous=previous, _request_timeout=TIMEOUT_SECONDS, **more
            )
        return str(answer)

    def operator_pods(self) -> list[tuple[str, str]]:
        """Returns (namespace, name) of the operator's pods."""
        with mapped_errors("the operator's pods"):
            answer = self.core.list_pod_for_all_namespaces(label_selector=OPERATOR_SELECTOR, _request_timeout=TIMEOUT_SECONDS)
        return [(pod.metadata.namespace, pod.metadata.name) for pod in answer.items]


def _default_files() -> list[Path]:
    named = os.environ.get("KUBECONFIG")
    return [Path(part) for part in named.split(os.pathsep) if part] if named else [Path("~/.kube/config").expanduser()]


def _connect(access: Access) -> tuple[Any, str]:
    """Returns a client, and the namespace of the configuration."""
    import yaml
    from kubernetes import client
    from kubernetes import config as untyped_config
    from kubernetes.config.config_exception import ConfigException
    from urllib3 import Retry

    if access.kubeconfig is not None and not access.kubeconfig.exists():
        raise ClusterError(f"--kubeconfig: there is no file {access.kubeconfig}", "name a kubeconfig file")
    if not access.is_configured:
        raise ClusterError("no cluster is configured: no ~/.kube/config and no $KUBECONFIG", "give --kubeconfig")
    in_cluster = access.kubeconfig is None and not any(file.exists() for file in _default_files())
    config: Any = untyped_config
    settings: Any = client.Configuration()
    # The client would try a dead address three times with pauses, while a person waits. But a server that is not ready, as for a
    # new CRD, says when to try again: kubectl waits for that too.
    settings.retries = Retry(BUSY_TRIES, connect=False, read=False, allowed_methods=None, raise_on_status=False)
    try:
        if in_cluster:
            config.load_incluster_config(client_configuration=settings)
            return client.ApiClient(settings), _IN_CLUSTER_NAMESPACE.read_text().strip()
        file = str(access.kubeconfig) if access.kubeconfig else None
        config.load_kube_config(file, access.context, client_configuration=settings, persist_config=False)
        contexts, current = config.list_kube_config_contexts(file)
    except (ConfigException, yaml.YAMLError, OSError) as error:
        raise ClusterError(f"the kubeconfig cannot be used: {error}", "see --kubeconfig and --context") from None
    chosen = next((entry for entry in contexts if entry["name"] == access.context), current)
    return client.ApiClient(settings), str(chosen["context"].get("namespace") or "default")


@contextlib.contextmanager
def mapped_errors(what: str) -> Iterator[None]:
    """Raises ClusterError in place of the client's errors."""
    import urllib3
    from kubernetes.client import ApiException

    try:
        yield
    except ApiException as error:
        status = int(error.status or 0)
        raise ClusterError(f"{what}: {_message(error)}", _FIXES.get(status, "see the message above"), status) from None
    except urllib3.exceptions.HTTPError as error:
        raise ClusterError(f"the API server cannot be reached: {error}", "see --kubeconfig and --context") from None


_FIXES = {
    401: "log in again: the cluster does not know these credentials",
    403: "ask for the role `edit` (or `view`, to look only) in this namespace",
    404: "see `starling check`",
}


def _message(error: Any) -> str:
    """Returns the API server's own message."""
    import json

    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return str(error.reason or error)
