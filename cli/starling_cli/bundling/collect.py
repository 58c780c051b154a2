"""Collects everything that helps to debug a service into a bundle. What cannot be read is listed as missing."""

import asyncio
import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starling_operator.plan.admin_token import TOKEN_VOLUME
from starling_operator.plan.config import TOKEN_KEY

from starling_cli.bundling.redact import redacted
from starling_cli.cluster.client import SERVICE_LABEL, Cluster, ClusterError, Object

OWNED_KINDS = (
    ("apps", "v1", "statefulsets", "StatefulSet"),
    ("apps", "v1", "controllerrevisions", "ControllerRevision"),
    ("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget"),
    ("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"),
)
CORE_KINDS = (("service", "Service"), ("config_map", "ConfigMap"), ("secret", "Secret"), ("service_account", "ServiceAccount"))
ADMIN_PORT = 8001
REPORT_SECONDS = 10.0


@dataclass
class Bundle:
    """`files`: contents by path in the archive. `missing`: a line for each thing that could not be read, with the reason."""

    files: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def add(self, path: str, read: Callable[[], Any]) -> None:
        """Adds what `read` returns, unless that is None. If it raises ClusterError, `path` is missing."""
        try:
            content = read()
        except ClusterError as error:
            self.missing.append(f"{path}: {error}")
            return
        if content is not None:
            self.files[path] = content if isinstance(content, str) else _yaml(redacted(content))


def collect(cluster: Cluster, name: str, log_lines: int) -> Bundle:
    """Raises ClusterError only if the service itself cannot be read."""
    bundle = Bundle()
    service = cluster.service(name)
    bundle.files["inferenceservice.yaml"] = _yaml(redacted(service))
    bundle.add("versions.yaml", lambda: _versions(cluster))
    _add_children(bundle, cluster, service)
    _add_pods(bundle, cluster, name, log_lines)
    bundle.add("events.yaml", lambda: _events(cluster, name))
    _add_operator(bundle, cluster, log_lines)
    return bundle


def _yaml(content: Any) -> str:
    import yaml

    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def _versions(cluster: Cluster) -> Object:
    from starling_agent.version import starling_version

    return {"starling": starling_version(), "kubernetes": cluster.version()}


def _add_children(bundle: Bundle, cluster: Cluster, service: Object) -> None:
    """Adds the service's children, found by owner UID and not by label: labels can be edited."""
    uid = service["metadata"]["uid"]
    lists: list[tuple[str, Callable[[], list[Object]]]] = []
    for group, version, plural, kind in OWNED_KINDS:
        lists.append((kind, partial(cluster.list_of, group, version, plural)))
    for resource, kind in CORE_KINDS:
        lists.append((kind, partial(cluster.core_list, resource)))
    for kind, read in lists:
        try:
            owned = [item for item in read() if _owned_by(item, uid)]
        except ClusterError as error:
            bundle.missing.append(f"children/{kind}: {error}")
            continue
        for item in owned:
            bundle.files[f"children/{kind}-{item['metadata']['name']}.yaml"] = _yaml(redacted({**item, "kind": kind}))


def _owned_by(item: Object, uid: str) -> bool:
    return any(owner["uid"] == uid for owner in item["metadata"].get("ownerReferences") or ())


def _add_pods(bundle: Bundle, cluster: Cluster, name: str, log_lines: int) -> None:
    try:
        pods = cluster.pods(name)
    except ClusterError as error:
        bundle.missing.append(f"pods: {error}")
        return
    tokens = _admin_tokens(cluster, name, bundle)
    for pod in pods:
        pod_name = pod["metadata"]["name"]
        bundle.files[f"pods/{pod_name}.yaml"] = _yaml(redacted(pod))
        bundle.add(f"logs/{pod_name}.log", partial(cluster.logs, pod_name, log_lines))
        if _has_restarted(pod):
            bundle.add(f"logs/{pod_name}.previous.log", partial(cluster.logs, pod_name, log_lines, previous=True))
        token = tokens.get(_token_secret(pod))
        if token is not None:
            bundle.add(f"reports/{pod_name}.json", partial(_report, cluster, pod_name, token))


def _has_restarted(pod: Object) -> bool:
    return any(entry.get("restartCount") for entry in pod.get("status", {}).get("containerStatuses") or ())


def _admin_tokens(cluster: Cluster, name: str, bundle: Bundle) -> dict[str, str]:
    """Returns admin tokens by Secret name. They are needed to read the agents' reports, and are never written to the bundle."""
    try:
        secrets = cluster.core_list("secret", f"{SERVICE_LABEL}={name}")
    except ClusterError as error:
        bundle.missing.append(f"reports: {error}")
        return {}
    found = {each["metadata"]["name"]: (each.get("data") or {}).get(TOKEN_KEY, "") for each in secrets}
    return {secret: base64.b64decode(token).decode() for secret, token in found.items()}


def _token_secret(pod: Object) -> str:
    """Returns the name of the Secret that holds the pod's admin token; "" if the pod mounts none."""
    mounted = (volume for volume in pod["spec"].get("volumes") or () if volume["name"] == TOKEN_VOLUME)
    return next((str(volume["secret"]["secretName"]) for volume in mounted), "")


def _report(cluster: Cluster, pod: str, token: str) -> str:
    from starling_agent.client.agent_client import AgentClient, AgentRefusal, NoAnswer
    from starling_agent.client.bounded import BadAnswer

    from starling_cli.cluster.port_forward import forwarded

    async def read(address: str) -> str:
        async with AgentClient(REPORT_SECONDS) as client:
            return await client.raw_report(address, token, seconds=REPORT_SECONDS)

    try:
        with forwarded(cluster, pod, ADMIN_PORT) as url:
            return asyncio.run(read(url.removeprefix("http://")))
    except (NoAnswer, AgentRefusal, BadAnswer) as error:
        raise ClusterError(f"the agent gave no report: {error}", "see the agent's log") from None


def _events(cluster: Cluster, name: str) -> list[Object]:
    """Returns events, oldest first, of the service and of every object whose name begins with `NAME-`."""
    events = cluster.core_list("event")
    about = [e for e in events if (n := e["involvedObject"].get("name", "")) == name or n.startswith(f"{name}-")]
    return sorted(about, key=lambda e: str(e.get("lastTimestamp") or e.get("eventTime") or ""))


def _add_operator(bundle: Bundle, cluster: Cluster, log_lines: int) -> None:
    try:
        pods = cluster.operator_pods()
    except ClusterError as error:
        bundle.missing.append(f"operator: {error}")
        return
    for namespace, pod in pods:
        bundle.add(f"operator/{pod}.log", partial(cluster.logs, pod, log_lines, namespace=namespace, container=None))


def contents(bundle: Bundle) -> Iterator[str]:
    """Yields a line for each file, then one for each that is missing, with the reason."""
    yield from (f"{path} ({len(text.encode())} bytes)" for path, text in sorted(bundle.files.items()))
    yield from (f"missing: {what}" for what in bundle.missing)
