"""Launch of a router process from its Deployment's pod template: the command with this machine's port, paths and backends."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from starling_operator.plan.observed import Manifest
from starling_operator.plan.router_pods import CONTAINER

from starling_cli.local.launch import ACCEPT_SECONDS, Launch, container_of, grace_seconds, program
from starling_cli.local.pod import LocalPod
from starling_cli.local.ports import LOCALHOST
from starling_cli.local.volumes import Mount, Objects, mount_all, path_here


def router_launch(deployment: Manifest, objects: Objects, pod: LocalPod, backends: Path) -> Launch:
    """Writes the files of a router's pod, which has its port. Raises LaunchError."""
    template = deployment["spec"]["template"]
    container = container_of(template, CONTAINER)
    mounts = mount_all(template, container, objects, (), pod.folder, {})
    name, subcommand, *flags = container["command"]
    return Launch(
        command=(*program(name), subcommand, *_flags_here(flags, pod.endpoint_port, backends, mounts)),
        environment={"TMPDIR": str(pod.scratch)},
        grace_seconds=grace_seconds(template),
    )


def _flags_here(flags: Sequence[str], port: int, backends: Path, mounts: tuple[Mount, ...]) -> Iterator[str]:
    """Returns the Deployment's flags, each --NAME=VALUE, with the values of this machine."""
    yield from (f"--host={LOCALHOST}", f"--port={port}", f"--backends-file={backends}")
    for name, value in (flag.split("=", 1) for flag in flags):
        match name:
            case "--host" | "--port" | "--backends-service" | "--backends-port":
                continue
            case "--accept-seconds":
                yield f"{name}={min(float(value), ACCEPT_SECONDS):g}"
            case _:
                yield f"{name}={path_here(value, mounts)}"
