"""Builds images from Dockerfiles with podman, and brings them to the nodes.

Nothing need be pulled: the base image is a small Debian with Python, made here by debootstrap.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from starling_cluster import cache, images
from starling_cluster.errors import HarnessError
from starling_cluster.place import Place

RELEASE = "bookworm"
BASE = f"localhost/starling-base:{RELEASE}"
PACKAGES = "python3,python3-venv,ca-certificates"
# crun does not work with every layout of cgroups, and the usual limits are above what an unprivileged machine may set.
PODMAN_BUILD = ("podman", "build", "--network=host", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024")
AUTHORITY = "/run/ca.crt"
LABEL = "dev.starling.harness=1"


def make_base() -> str:
    """Name of the base image, made if need be: a minute or two, only once."""
    with cache.lock(cache.folder() / "base.lock"):
        if _run("podman", "image", "exists", BASE, check=False).returncode != 0:
            archive = cache.folder() / f"base-{RELEASE}.tar"
            if not archive.exists():
                _debootstrap(archive)
            _run("podman", "import", "--quiet", str(archive), BASE)
    return BASE


def build(tag: str, dockerfile: Path, arguments: list[str], context: Path = cache.ROOT) -> None:
    """`arguments` are NAME=VALUE; BASE_IMAGE is the harness's own base where they do not say otherwise."""
    if not any(argument.startswith("BASE_IMAGE=") for argument in arguments):
        arguments = [f"BASE_IMAGE={make_base()}", *arguments]
    options = [f"--build-arg={argument}" for argument in arguments] + _trust()
    if runc := shutil.which("runc"):
        options.append(f"--runtime={runc}")
    command = [*PODMAN_BUILD, *options, "--label", LABEL, "--tag", tag, "--file", str(dockerfile), str(context)]
    if subprocess.run(command, check=False).returncode != 0:
        raise HarnessError(f"podman could not build {dockerfile}; see its output above")
    # What the tag named before has gigabytes, and nobody else removes it.
    _run("podman", "image", "prune", "--force", f"--filter=label={LABEL}", check=False)


def load(place: Place, name: str, nodes: range) -> None:
    """Brings an image of podman's to the nodes, without a file between: images of torch have gigabytes."""
    for node in nodes:
        with subprocess.Popen(["podman", "save", "--quiet", "--format=docker-archive", name], stdout=subprocess.PIPE) as saved:
            images.load_stream(place, node, saved.stdout)
        if saved.returncode != 0:
            raise HarnessError(f"podman could not save {name}; see its output above")


def _debootstrap(archive: Path) -> None:
    print(f"making the base image {BASE} (a minute or two, only once)", flush=True)
    with tempfile.TemporaryDirectory(dir=cache.folder()) as scratch:
        root, tar = Path(scratch) / "root", Path(scratch) / "base.tar"
        _run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", RELEASE, str(root))
        leftovers = ("--exclude=./var/cache/apt/*", "--exclude=./var/lib/apt/lists/*", "--exclude=./usr/share/doc/*")
        _run("tar", "--create", f"--file={tar}", f"--directory={root}", "--numeric-owner", *leftovers, ".")
        tar.replace(archive)


def _trust() -> list[str]:
    """A machine with a certificate authority of its own says so in SSL_CERT_FILE; a build that downloads must know it too."""
    bundle = os.environ.get("SSL_CERT_FILE")
    return [f"--volume={bundle}:{AUTHORITY}:ro", f"--build-arg=SSL_CERT_FILE={AUTHORITY}"] if bundle else []


def _run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        raise HarnessError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()[-2000:]}")
    return done
