"""A real API server with the CRD of this release, and a namespace for each test."""

import json
import subprocess
import time
import uuid

import pytest

from tests.cli.commands.running import starling
from tests.kube.apiserver import apiserver, kubectl

__all__ = ["apiserver", "cluster"]


class OneNamespace:
    """kubectl and starling against one namespace."""

    def __init__(self, kubeconfig, name):
        self.kubeconfig, self.name = kubeconfig, name

    def kubectl(self, *arguments, input=None):
        command = [*kubectl(self.kubeconfig), "-n", self.name, *arguments]
        done = subprocess.run(command, input=input, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def apply(self, *objects):
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        self.kubectl("apply", "-f", "-", input=text)

    def get(self, kind, name):
        return json.loads(self.kubectl("get", kind, name, "-o", "json"))

    def set_status(self, kind, name, status):
        self.kubectl("patch", kind, name, "--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))

    def starling(self, *arguments, **more):
        return starling(*arguments, "-n", self.name, "--kubeconfig", self.kubeconfig, **more)


def install_crd(kubeconfig):
    """Installs the CRDs as a user would: `starling crds | kubectl apply --server-side -f -`."""
    apply = [*kubectl(kubeconfig), "apply", "--server-side", "-f", "-"]
    done = subprocess.run(apply, input=starling("crds").stdout, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    # `kubectl wait` fails where no condition was written yet, so the kind itself is asked for.
    _until_found([*kubectl(kubeconfig), "get", "inferenceservices"])


def _until_found(command):
    deadline = time.monotonic() + 60
    while (asked := subprocess.run(command, text=True, capture_output=True, timeout=60)).returncode:
        assert time.monotonic() < deadline, asked.stderr
        time.sleep(0.1)


@pytest.fixture(scope="session")
def crd(apiserver):
    install_crd(apiserver)
    return apiserver


@pytest.fixture
def cluster(crd):
    made = OneNamespace(crd, f"commands-{uuid.uuid4().hex[:8]}")
    made.kubectl("create", "namespace", made.name)
    # A controller makes it, a moment later; it has tokens, and pods are refused without it.
    _until_found([*kubectl(crd), "-n", made.name, "get", "serviceaccount", "default"])
    yield made
    made.kubectl("delete", "namespace", made.name, "--wait=false")
