"""The Go programs that no package manager brings: `kube` (all of Kubernetes in one file) and Helm. Built once, then cached."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from starling_cluster import cache
from starling_cluster.errors import HarnessError

SOURCES = Path(__file__).parents[1] / "kube"
HELM = "helm.sh/helm/v4/cmd/helm@v4.3.1"


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


def helm_path() -> Path:
    return cache.folder() / HELM.rpartition("@")[2].replace("v", "helm-v", 1) / "helm"


def build_kube() -> Path:
    """Path of the built binary: at once when it is in the cache, in 6 to 8 minutes on two cores when nothing is."""
    return _build(kube_path(), _compile_kube, "Kubernetes (6 to 8 minutes on two cores, only once)")


def build_helm() -> Path:
    return _build(helm_path(), _install_helm, "Helm (4 minutes on two cores, only once)")


def _build(target: Path, make: Callable[[Path], None], what: str) -> Path:
    """Builds beside the target and renames, so that a half-written file is never found; a second builder waits for the first."""
    if target.exists():
        return target
    with cache.lock(target.parent / "lock"):
        if not target.exists():
            print(f"building {what}", file=sys.stderr, flush=True)
            scratch = target.parent / "scratch"
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
            make(scratch)
            (scratch / target.name).replace(target)
            shutil.rmtree(scratch)
    return target


def _compile_kube(scratch: Path) -> None:
    version = kubernetes_version()
    major, minor = version.removeprefix("v").split(".")[:2]
    names = {"gitVersion": version, "gitMajor": major, "gitMinor": minor}
    stamps = " ".join(f"-X k8s.io/component-base/version.{name}={value}" for name, value in names.items())
    _go(["build", "-trimpath", "-ldflags", f"-s -w {stamps}", "-o", str(scratch / "kube"), "."], {})


def _install_helm(scratch: Path) -> None:
    _go(["install", "-trimpath", "-ldflags", "-s -w", HELM], {"GOBIN": str(scratch)})


def _go(arguments: list[str], environment: dict[str, str]) -> None:
    if shutil.which("go") is None:
        raise HarnessError("go is not on the PATH; install Go 1.24 or newer, or give the tests a cluster of your own by KUBECONFIG")
    done = subprocess.run(["nice", "go", *arguments], cwd=SOURCES, env={**os.environ, **environment}, check=False)
    if done.returncode != 0:
        raise HarnessError(f"go {arguments[0]} ended with status {done.returncode}; see its output above")
