"""ServiceMonitor, HTTPRoute and InferencePool: the latter two are what their projects publish, with each rule of theirs."""

import functools
import subprocess
from pathlib import Path

import yaml

from tests.kube.apiserver import HARNESS
from tests.operator.shell.cluster import Manifest

GROUPS = {
    "ServiceMonitor": "monitoring.coreos.com",
    "HTTPRoute": "gateway.networking.k8s.io",
    "InferencePool": "inference.networking.k8s.io",
}
"""Groups of the kinds whose CRDs come and go."""
SERVICE_MONITORS: Manifest = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "servicemonitors.monitoring.coreos.com"},
    "spec": {
        "group": "monitoring.coreos.com",
        "scope": "Namespaced",
        "names": {"kind": "ServiceMonitor", "plural": "servicemonitors", "singular": "servicemonitor"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}
"""It takes anything: the true one is not published as a file of a module."""


@functools.cache
def _published() -> dict[str, Manifest]:
    """The CRDs by kind. `libyaml` reads 430 KB in a tenth of a second, which PyYAML's own parser takes five for."""
    done = subprocess.run([*HARNESS, "crds"], check=True, stdout=subprocess.PIPE, text=True)
    read = [yaml.load(Path(path).read_text(), yaml.CSafeLoader) for path in done.stdout.split()]
    return {crd["spec"]["names"]["kind"]: crd for crd in read}


def crd(kind: str) -> Manifest:
    return SERVICE_MONITORS if kind == "ServiceMonitor" else _published()[kind]
