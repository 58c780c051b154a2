"""The harness's own images: the one that holds a pod's namespaces, and thin ones that run the checkout as it is.

A thin image is a skeleton of links to what `mounts` brings. It looks like the image that the Dockerfile of the same name
builds (user, home, entry point), and is made in no time.
"""

import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from starling_cluster import archive, cache, mounts
from starling_cluster.archive import Image
from starling_cluster.errors import HarnessError
from starling_cluster.place import Place

PAUSE = "localhost/starling-pause:1"
THIN = "localhost/starling-thin:1"
THIN_AGENT = "localhost/starling-agent:thin"
THIN_OPERATOR = "localhost/starling-operator:thin"
USER = 10001
HOME = "/home/starling"
# The environment's own commands name their interpreter by the path that it has on this machine.
COMMAND = f"#!{mounts.ENVIRONMENT}/bin/python\nimport sys\n\nfrom {{}} import main\n\nsys.exit(main())\n"
PAUSE_SOURCE = """#include <signal.h>
#include <unistd.h>
static void end(int signal) { _exit(0); }
int main(void) { signal(SIGTERM, end); for (;;) pause(); }
"""


def load_own(place: Place, nodes: range) -> None:
    """Gives every node the harness's own images."""
    with tempfile.TemporaryDirectory() as scratch:
        for number, image in enumerate(_own()):
            path = Path(scratch) / f"{number}.tar"
            archive.write(image, path)
            load_archive(place, nodes, path)


def load_archive(place: Place, nodes: range, path: Path) -> None:
    """Brings a Docker archive to all nodes at once."""

    def load(node: int) -> None:
        with path.open("rb") as stream:
            load_stream(place, node, stream)

    with ThreadPoolExecutor(len(nodes)) as pool:
        list(pool.map(load, nodes))


def load_stream(place: Place, node: int, stream: IO[bytes] | None) -> None:
    """Brings what `podman save --format docker-archive` writes to a node."""
    socket = place.node(node) / "containerd.sock"
    command = ["ctr", "-a", str(socket), "-n", "k8s.io", "images", "import", "-"]
    done = subprocess.run(command, stdin=stream, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HarnessError(f"node {node} did not take an image: {done.stderr.strip()}")


def _own() -> list[Image]:
    pause = Image(PAUSE, files={"pause": (_pause(), 0o755)}, config={"Entrypoint": ["/pause"], "User": "65535:65535"})
    return [pause, _thin(THIN, []), _thin(THIN_AGENT, ["starling", "agent"]), _thin(THIN_OPERATOR, ["starling"])]


def _thin(name: str, entrypoint: list[str]) -> Image:
    paths = ["usr", *(str(path.relative_to("/")) for path in mounts.SYSTEM if path.parent != Path("/"))]
    links = {path: str(mounts.MACHINE / path) for path in paths}
    links |= {name: f"usr/{name}" for name in ("bin", "lib", "lib64", "sbin") if Path("/", name).is_symlink()}
    # The examples' model, where the agent's image has it.
    links["opt/starling/models"] = str(mounts.CHECKOUT / "models")
    links["opt/starling/bin/envoy"] = str(mounts.ENVOY / "envoy" / "_bin" / "envoy")
    # The checkout or the interpreter may lie in the home of root, which ordinary users cannot enter.
    folders = {
        "etc": 0o755,
        "opt": 0o755,
        "opt/starling": 0o755,
        "opt/starling/bin": 0o755,
        "root": 0o755,
        "home": 0o755,
        HOME.lstrip("/"): 0o777,
        "tmp": 0o1777,
        "var": 0o755,
        "var/tmp": 0o1777,
    }
    users = f"root:x:0:0:root:/root:/bin/sh\nstarling:x:{USER}:{USER}::{HOME}:/bin/sh\n"
    groups = f"root:x:0:\nstarling:x:{USER}:\n"
    files = {
        "etc/passwd": (users.encode(), 0o644),
        "etc/group": (groups.encode(), 0o644),
        "etc/nsswitch.conf": (b"hosts: files dns\n", 0o644),
        "opt/starling/bin/starling": (COMMAND.format("starling_cli.main").encode(), 0o755),
        "opt/starling/bin/mooncake_master": (COMMAND.format("mooncake.cli").encode(), 0o755),
    }
    config = {"Env": _environment(), "User": f"{USER}:{USER}", "WorkingDir": HOME, "Entrypoint": entrypoint or None}
    return Image(name, files, links, folders, config)


def _environment() -> list[str]:
    packages = ":".join(str(mounts.CHECKOUT / room) for room in ("crds", "engine", "agent", "operator", "router", "cli"))
    return [
        f"PATH=/opt/starling/bin:{mounts.ENVIRONMENT}/bin:/usr/local/bin:/usr/bin:/bin",
        f"PYTHONPATH={packages}",
        f"HOME={HOME}",
        f"STARLING_KERNELS={mounts.KERNELS}",
        "PYTHONUNBUFFERED=1",
        # So that the scenarios run without kernels where their caller does.
        f"STARLING_NATIVE={os.environ.get('STARLING_NATIVE', '1')}",
    ]


def _pause() -> bytes:
    """Compiled once; kept in the cache."""
    target = cache.folder() / "pause"
    with cache.lock(cache.folder() / "pause.lock"):
        if not target.exists():
            scratch = target.with_name(f"pause.{os.getpid()}")
            command = ["gcc", "-Os", "-static", "-x", "c", "-", "-o", str(scratch)]
            subprocess.run(command, input=PAUSE_SOURCE, text=True, check=True)
            scratch.replace(target)
    return target.read_bytes()
