"""Helm and an API server. Both are built once and kept outside the checkout; where one is missing the first test waits for it."""

import subprocess
from collections.abc import Iterator

import pytest

from tests.charts.helm import ROOT, Helm
from tests.charts.kubectl import Kubectl
from tests.kube.apiserver import kubectl as kubectl_command
from tests.kube.apiserver import started


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    installed = subprocess.run([ROOT / "charts/tools/install-helm.sh"], stdout=subprocess.PIPE, text=True, check=False)
    assert installed.returncode == 0, "charts/tools/install-helm.sh failed; its output above says why"
    return Helm(installed.stdout.strip(), tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="module")
def kubectl() -> Iterator[Kubectl]:
    """An API server for these tests alone: they install the CRD and cluster roles by Helm, which takes over nobody's objects."""
    with started("--controllers") as kubeconfig:
        yield Kubectl(tuple(kubectl_command(kubeconfig)), kubeconfig)
