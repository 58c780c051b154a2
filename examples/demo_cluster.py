"""`make demo-cluster`: what a user of a cluster types, on a two-node Kubernetes that is made here and taken down again.

usage: demo_cluster.py [MANIFEST]
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
HARNESS = [sys.executable, str(ROOT / "e2e" / "cluster")]
STARLING = str(Path(sys.executable).with_name("starling"))
QUESTION = "What does os.path.join do?"
IMAGES = {"image": "localhost/starling-operator", "agent.image": "localhost/starling-agent"}

CHANGES = """\
Until the demo ends this machine has a bridge (star0), two network namespaces, cgroups, kubelets that run as root,
and the kernel settings that these want. What stays: packages that were missing, as named above; a built Kubernetes
and Helm in ~/.cache/starling; empty folders in /var/lib and /run."""


def main() -> None:
    manifest = sys.argv[1] if len(sys.argv) > 1 else "examples/quickstart.yaml"
    print(CHANGES, flush=True)
    helm = subprocess.run([*HARNESS, "helm"], check=True, capture_output=True, text=True).stdout.split()[-1]
    folder = tempfile.mkdtemp(prefix="starling-demo-")
    try:
        subprocess.run([*HARNESS, "up", folder, "--nodes", "2", "--owner", str(os.getpid())], check=True)
        os.environ["KUBECONFIG"] = f"{folder}/kubeconfig"
        walk(helm, f"{folder}/bin/kubectl", manifest)
    finally:
        subprocess.run([*HARNESS, "down", folder], check=True)


def walk(helm: str, kubectl: str, manifest: str) -> None:
    show(kubectl, "get", "nodes")
    values = [
        option
        for key, repository in IMAGES.items()
        for option in (f"--set={key}.repository={repository}", f"--set-string={key}.tag=thin")
    ]
    show(
        helm, "install", "starling", "charts/starling", "-n", "starling-system", "--create-namespace", "--wait", *values, quiet=True
    )
    began = time.monotonic()
    show(kubectl, "apply", "-f", manifest)
    show(kubectl, "wait", "--for=condition=Ready", "infsvc", "--all", "--timeout=180s")
    print(f"({time.monotonic() - began:.1f} s from apply to Ready)")
    show(kubectl, "get", "infsvc,pods", "-o", "wide")
    listed = subprocess.run([kubectl, "get", "infsvc", "-o", "name"], check=True, capture_output=True, text=True).stdout
    name = listed.split()[0].rpartition("/")[2]
    show(STARLING, "chat", name, QUESTION, "--max-tokens", "120")
    show(STARLING, "status", name)
    show(kubectl, "delete", "-f", manifest)


def show(*command: str, quiet: bool = False) -> None:
    """Runs a command as a person would, with its words before its output."""
    print(f"\n$ {Path(command[0]).name} {' '.join(command[1:])}", flush=True)
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL if quiet else None)


if __name__ == "__main__":
    main()
