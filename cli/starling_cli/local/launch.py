"""Launch of an agent process from a StatefulSet's pod template: the command, its variables and its files.

Settings that only a cluster can honour (image, resources, placement, probes, security) do not reach a process; `unused_here` names
those that the user wrote, for a note of `starling up`.
"""

import hashlib
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic.alias_generators import to_camel
from starling_agent.contract.config import CONFIG_PATH, AgentConfig
from starling_agent.contract.identity import LEADER
from starling_crds.v1alpha1.spec import InferenceServiceSpec
from starling_operator.plan.config import CACHE_PATH

from starling_cli.local.ports import LOCALHOST
from starling_cli.local.sources import FILE, PathMap, SourceError, map_path
from starling_cli.local.variables import DownwardFields, environment
from starling_cli.local.volumes import LaunchError, Mount, Objects, local_path, mount_all, path_here

CONTAINER = "agent"
ACCEPT_SECONDS = 0.5


@dataclass(frozen=True)
class PodPlacement:
    """Folders and addresses that this machine gives to a pod.

    folder         for its volumes and files
    scratch        instead of /tmp; a short path, for sockets are made in it
    weights        for downloads, also after this run
    service_url    URL of the proxy
    leader         host and port of the admin endpoint of the group's first pod
    """

    folder: Path
    scratch: Path
    weights: Path
    endpoint_port: int
    admin_port: int
    service_url: str
    leader: str
    maps: Sequence[PathMap]


@dataclass(frozen=True)
class Launch:
    """The command to start. An agent's has its token and the hashes of its configuration, one of which the agent reports."""

    command: tuple[str, ...]
    environment: dict[str, str]
    grace_seconds: float
    token: str = ""
    config_hash: str = ""
    cluster_config_hash: str = ""
    """Hash of the configuration as the plan made it, which the plan looks for in the report."""


def launch(pod: str, uid: str, group: Mapping[str, Any], objects: Objects, placement: PodPlacement) -> Launch:
    """`group` is the StatefulSet. Writes the pod's files. Raises LaunchError."""
    template = group["spec"]["template"]
    container = container_of(template, CONTAINER)
    # Downloads are kept, also where a cluster would keep them in a claim; a folder that the user named is used as it is.
    persistent = {CACHE_PATH: placement.weights, "/tmp": placement.scratch}
    mounts = mount_all(template, container, objects, placement.maps, placement.folder, persistent)
    text = _config_text(mounts)
    local_text = _local_config(text, mounts, placement)
    config_file = placement.folder / "agent.json"
    config_file.write_text(local_text)
    meta = template.get("metadata", {})
    namespace = group["metadata"].get("namespace", "default")
    fields = DownwardFields(pod, namespace, uid, meta.get("labels") or {}, meta.get("annotations") or {}, socket.gethostname())
    return Launch(
        command=_command(container, mounts, config_file),
        environment={
            "TMPDIR": str(placement.scratch),
            LEADER: placement.leader,
            **_as_this_user(environment(container, fields, objects, mounts)),
        },
        token=_token(local_text),
        config_hash=hashlib.sha256(local_text.encode()).hexdigest(),
        cluster_config_hash=hashlib.sha256(text.encode()).hexdigest(),
        grace_seconds=grace_seconds(template),
    )


def _as_this_user(variables: dict[str, str]) -> dict[str, str]:
    """Returns the variables without HOME: a process here has one, with the hub's login and the kernels built before."""
    return {name: value for name, value in variables.items() if name != "HOME"}


def container_of(template: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Raises LaunchError where there is none of this name."""
    for container in template["spec"]["containers"]:
        if container["name"] == name:
            return dict(container)
    raise LaunchError(f"spec.template: there is no container {name!r}")


def grace_seconds(template: Mapping[str, Any]) -> float:
    """Returns the time from SIGTERM to SIGKILL."""
    return float(template["spec"].get("terminationGracePeriodSeconds") or 30)


def program(name: str) -> tuple[str, ...]:
    """Returns the words that start a container's program here: `starling` is this installation's."""
    return (sys.executable, "-m", "starling_cli.main") if name == "starling" else (name,)


def _config_text(mounts: Sequence[Mount]) -> str:
    file = local_path(CONFIG_PATH, mounts)
    if file is None or not file.exists():
        raise LaunchError(f"spec.template: nothing is mounted at {CONFIG_PATH}")
    return file.read_text()


def _local_config(text: str, mounts: Sequence[Mount], placement: PodPlacement) -> str:
    """The same configuration with this machine's addresses, ports and paths."""
    config = AgentConfig.model_validate_json(text)
    model = {
        "source": _source(config.model.source, mounts, placement.maps),
        "cache_dir": str(local_path(config.model.cache_dir, mounts) or placement.weights),
        "pin_file": str(local_path(config.model.pin_file, mounts)) if config.model.pin_file is not None else None,
    }
    endpoint = {
        "host": LOCALHOST,
        "port": placement.endpoint_port,
        "service_url": placement.service_url if config.endpoint.service_url else None,
        **{name: _file(getattr(config.endpoint, name), mounts) for name in ("api_key_file", "tls_cert_file", "tls_key_file")},
        "response_store": _folder(config.endpoint.response_store, mounts),
    }
    admin = {"host": LOCALHOST, "port": placement.admin_port, "token_file": _file(config.admin.token_file, mounts)}
    # No load balancer of this machine lags: a pod that is stopped gets no new connection.
    drain = {"accept_seconds": min(config.drain.accept_seconds, ACCEPT_SECONDS)}
    engine = config.engine
    if "kv_fs_path" in engine:
        engine = {**engine, "kv_fs_path": _folder(engine["kv_fs_path"], mounts)}
    parts = {
        "engine": engine,
        "drain": config.drain.model_copy(update=drain),
        "model": config.model.model_copy(update=model),
        "endpoint": config.endpoint.model_copy(update=endpoint),
        "admin": config.admin.model_copy(update=admin),
    }
    return config.model_copy(update=parts).model_dump_json(indent=2)


def _folder(path: str | None, mounts: Sequence[Mount]) -> str | None:
    return None if path is None else path_here(path, mounts)


def _source(source: str, mounts: Sequence[Mount], maps: Sequence[PathMap]) -> str:
    if not source.startswith(FILE):
        return source
    path = source.removeprefix(FILE)
    mounted = local_path(path, mounts)
    if mounted is not None and not mounted.exists():
        mounted = None  # the folder in place of /tmp is empty, and nobody means that one
    try:
        return f"{FILE}{mounted or map_path(path, maps)}"
    except SourceError as error:
        raise LaunchError(f"spec.model.source: {error}") from None


def _file(path: str | None, mounts: Sequence[Mount]) -> str | None:
    if path is None:
        return None
    found = local_path(path, mounts)
    if found is None or not found.exists():
        raise LaunchError(f"{path} is in none of the pod's volumes, or its Secret lacks the key {Path(path).name!r}")
    return str(found)


def _token(config: str) -> str:
    return Path(AgentConfig.model_validate_json(config).admin.token_file).read_text().strip()


def _command(container: Mapping[str, Any], mounts: Sequence[Mount], config_file: Path) -> tuple[str, ...]:
    """Returns the command with this installation's `starling`, and with the local paths of volumes."""
    words = [*(container.get("command") or ["starling", "agent", "--config", CONFIG_PATH]), *(container.get("args") or ())]
    rest = [str(config_file) if word == CONFIG_PATH else path_here(word, mounts) for word in words[1:]]
    return (*program(words[0]), *rest)


_IN_POD_SPEC = {
    "affinity", "hostNetwork", "imagePullSecrets", "nodeName", "nodeSelector", "priorityClassName", "runtimeClassName",
    "schedulerName", "securityContext", "serviceAccountName", "tolerations", "topologySpreadConstraints", "initContainers",
}  # fmt: skip
_IN_CONTAINER = {"image", "resources", "securityContext", "lifecycle", "livenessProbe", "readinessProbe", "startupProbe"}

_IN_ROUTER = ("replicas", "resources", "nodeSelector", "tolerations", "priorityClassName")


def unused_here(spec: InferenceServiceSpec) -> list[str]:
    """Fields that the user wrote and that mean nothing to a process of this machine. One router serves in place of several."""
    pod, router = spec.template.get("spec") or {}, spec.router
    found = ["spec.image"] if spec.image else []
    found += ["spec.endpoint.route"] if spec.endpoint.route is not None else []
    found += [f"spec.template.spec.{name}" for name in sorted(_IN_POD_SPEC & set(pod))]
    for container in pod.get("containers") or ():
        name = container.get("name", "?")
        if name == CONTAINER:
            found += [f"spec.template.spec.containers[agent].{field}" for field in sorted(_IN_CONTAINER & set(container))]
        else:
            found.append(f"spec.template.spec.containers[{name}]")
    found += [f"spec.scaling.{to_camel(name)}" for name in type(spec.scaling).model_fields if name in spec.scaling.model_fields_set]
    if spec.rollout.canary is not None:
        found.append("spec.rollout.canary")
    if router is not None:
        written = {to_camel(name) for name in router.model_fields_set} - ({"replicas"} if router.replicas == 1 else set())
        found += [f"spec.router.{name}" for name in _IN_ROUTER if name in written]
    return found
