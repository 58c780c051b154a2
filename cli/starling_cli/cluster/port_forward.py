"""A port of this machine that leads to a pod, through the API server; no kubectl needed."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

from starling_cli.cluster.client import ROLE_LABEL, SERVICE_LABEL, Cluster, ClusterError, Object, mapped_errors

ENDPOINT_PORT = 8000
_CHUNK = 64 * 1024


def ready_pod(cluster: Cluster, service: str) -> str:
    """Returns the name of a pod that serves. Raises ClusterError saying why there is none."""
    found = cluster.service(service)
    if found.get("spec", {}).get("endpoint", {}).get("tlsSecret"):
        raise ClusterError(
            f"InferenceService {service!r} serves HTTPS with a certificate for its own name, which a forwarded port does not have",
            "reach it by that name, with --url https://...",
        )
    for pod in cluster.core_list("pod", f"{SERVICE_LABEL}={service},{ROLE_LABEL}=serving"):
        if _is_ready(pod):
            return str(pod["metadata"]["name"])
    conditions = {entry["type"]: entry for entry in found.get("status", {}).get("conditions", ())}
    cause = conditions.get("Ready", {}).get("message", "")
    raise ClusterError(
        f"no pod of InferenceService {service!r} is ready: {cause}", f"see `starling status {service} -n {cluster.namespace}`"
    )


def _is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions") or ()
    deleting = "deletionTimestamp" in pod["metadata"]
    return not deleting and any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)


@contextlib.contextmanager
def forwarded(cluster: Cluster, pod: str, port: int = ENDPOINT_PORT) -> Iterator[str]:
    """Yields the base URL of a local port that leads to the pod's. Each connection is a stream of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_accept, args=(listener, cluster, pod, port), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, cluster: Cluster, pod: str, port: int) -> None:
    """Accepts connections in one thread: to open a stream replaces a method of the client, which other threads must not call."""
    while True:
        try:
            local, _ = listener.accept()
        except OSError:
            return
        try:
            remote = _open_stream(cluster, pod, port)
        except ClusterError:
            # The HTTP client on this machine reports that the connection was closed.
            local.close()
            continue
        for source, target in ((local, remote), (remote, local)):
            threading.Thread(target=_pump, args=(source, target), daemon=True).start()


def _open_stream(cluster: Cluster, pod: str, port: int) -> Any:
    """Returns a socket whose other end is in the pod."""
    from kubernetes import stream

    with mapped_errors(f"port-forward to pod {pod!r}"):
        opened = stream.portforward(cluster.core.connect_get_namespaced_pod_portforward, pod, cluster.namespace, ports=str(port))
    return opened.socket(port)


def _pump(source: Any, target: Any) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
