"""The Go programs that no package manager brings: `kube` (all of Kubernetes in one file), and Helm. Built once, then cached."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from starling_cluster import cache
from starling_cluster.errors import HarnessError

SOURCES = Path(__file__).parents[1] / "kube"
HELM = cache.ROOT / "charts" / "tools" / "install-helm.sh"
COLLECTOR = "400"
"""The compiler is a program that ends soon: to collect its garbage at every doubling takes a tenth of its time."""


def kubernetes_version() -> str:
    """As go.mod pins it, such as `v1.34.4`."""
    found = re.search(r"^\s*k8s\.io/kubernetes (v\S+)$", (SOURCES / "go.mod").read_text(), re.MULTILINE)
    if found is None:
        raise HarnessError(f"{SOURCES / 'go.mod'} names no version of k8s.io/kubernetes")
    return found[1]


def kube_path() -> Path:
    """Where the binary of these sources is, or will be."""
    digest = hashlib.sha256()
    for source in sorted(path for path in SOURCES.iterdir() if path.is_file()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return cache.folder() / f"kube-{digest.hexdigest()[:16]}" / "kube"


def build_kube() -> Path:
    """Path of the binary: at once when it is in the cache, in 6 to 8 minutes on two cores when nothing is.

    Built beside its place and renamed, so that a half-written file is never found; a second builder waits for the first.
    """
    target = kube_path()
    if target.exists():
        return target
    with cache.lock(target.parent / "lock"):
        if not target.exists():
            print("building Kubernetes (6 to 8 minutes on two cores, only once)", file=sys.stderr, flush=True)
            scratch = target.with_suffix(".new")
            _compile(scratch)
            scratch.replace(target)
    return target


def build_helm() -> Path:
    """Path of the Helm that the chart's tests use."""
    done = subprocess.run([str(HELM)], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise HarnessError(f"{HELM} ended with status {done.returncode}; see its output above")
    return Path(done.stdout.strip())


def need_go() -> None:
    if shutil.which("go") is None:
        raise HarnessError("go is not on the PATH; install Go 1.24 or newer, or give the tests a cluster of your own")


def _compile(output: Path) -> None:
    need_go()
    version = kubernetes_version()
    major, minor = version.removeprefix("v").split(".")[:2]
    names = {"gitVersion": version, "gitMajor": major, "gitMinor": minor}
    stamps = " ".join(f"-X k8s.io/component-base/version.{name}={value}" for name, value in names.items())
    # What -w leaves out of the program, -dwarf=false leaves out of each package.
    options = ["-trimpath", "-gcflags=all=-dwarf=false", "-ldflags", f"-s -w {stamps}"]
    command = ["nice", "go", "build", *options, "-o", str(output), "."]
    environment = {**os.environ, "GOGC": os.environ.get("GOGC", COLLECTOR)}
    if (status := subprocess.run(command, cwd=SOURCES, env=environment, check=False).returncode) != 0:
        raise HarnessError(f"go build ended with status {status}; see its output above")
