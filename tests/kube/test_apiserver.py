"""What other tests stand on: a real API server whose controllers work, that ends with whoever started it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kube.apiserver import GIVEN, HARNESS, WORKER, kubectl, of_all_workers, started

SET = {
    "apiVersion": "apps/v1",
    "kind": "StatefulSet",
    "metadata": {"name": "web"},
    "spec": {
        "serviceName": "web",
        "replicas": 2,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": {"app": "web"}},
        "template": {
            "metadata": {"labels": {"app": "web"}},
            "spec": {"containers": [{"name": "c", "image": "localhost/none:1"}]},
        },
    },
}
OWNED = """
import os, subprocess, sys, time
subprocess.run([*sys.argv[1:], "--owner", str(os.getpid())], check=True)
print(flush=True)
time.sleep(60)
"""


def run(kubeconfig: Path, *arguments: str, text: str | None = None) -> str:
    done = subprocess.run([*kubectl(kubeconfig), *arguments], input=text, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_until(is_true: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_controllers_make_pods_and_collect_them(apiserver: Path) -> None:
    run(apiserver, "create", "namespace", "kube-test")
    run(apiserver, "-n", "kube-test", "apply", "-f", "-", text=json.dumps(SET))
    wait_until(lambda: run(apiserver, "-n", "kube-test", "get", "pods", "-o", "name").split() == ["pod/web-0", "pod/web-1"])
    run(apiserver, "-n", "kube-test", "delete", "statefulset", "web")
    # Nobody is there to end a pod that has no node, but the API server itself.
    wait_until(lambda: not run(apiserver, "-n", "kube-test", "get", "pods", "-o", "name"))
    run(apiserver, "delete", "namespace", "kube-test", "--wait=false")


@pytest.mark.skipif(GIVEN in os.environ, reason="none is started")
def test_there_is_one_for_all_workers_which_ends_with_their_parent(
    apiserver: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    owner = json.loads((apiserver.parent / "state.json").read_text())["owner"]["pid"]
    if WORKER in os.environ:
        assert owner == os.getppid() and of_all_workers(tmp_path_factory.getbasetemp().parent) == apiserver
    else:
        assert owner == os.getpid()


def test_two_servers_stand_side_by_side(apiserver: Path) -> None:
    with started() as other:
        run(other, "create", "namespace", "only-here")
        assert "only-here" not in run(apiserver, "get", "namespaces", "-o", "name")
    assert not other.parent.exists()


def test_it_ends_when_its_owner_is_killed() -> None:
    folder = Path(f"/tmp/starling-owned-{time.monotonic_ns()}")
    with subprocess.Popen([sys.executable, "-c", OWNED, *HARNESS, "apiserver", "up", str(folder)], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        while owner.stdout.readline().strip():
            pass
        assert (folder / "kubeconfig").exists()
        owner.kill()
    wait_until(lambda: not folder.exists())
