"""The CRD on a real API server, and a client that asks it about manifests."""

from pathlib import Path

import pytest
from starling_crds.manifest import FILE_NAME

from tests.crds.api import Api, Kubectl, installed
from tests.kube.apiserver import apiserver, kubectl

__all__ = ["apiserver"]

CRD = Path(__file__).parents[2] / "crds" / FILE_NAME


@pytest.fixture(scope="session")
def ctl(apiserver: Path) -> Kubectl:
    made = Kubectl(tuple(kubectl(apiserver)))
    installed(made, CRD)
    return made


@pytest.fixture(scope="session")
def api(apiserver: Path, ctl: Kubectl) -> Api:
    del ctl  # has installed the CRD
    return Api(apiserver)
