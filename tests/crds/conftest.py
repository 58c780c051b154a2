"""The CRDs on a real API server, and a client that asks it about manifests."""

from pathlib import Path

import pytest
from starling_crds.manifest import GROUP, PLURAL, SCALE_PLURAL

from tests.crds.api import Api, Kubectl, installed
from tests.kube.apiserver import apiserver, kubectl

__all__ = ["apiserver"]

FOLDER = Path(__file__).parents[2] / "crds"
CRD, SCALE_CRD = (FOLDER / f"{plural}.{GROUP}.yaml" for plural in (PLURAL, SCALE_PLURAL))


@pytest.fixture(scope="session")
def ctl(apiserver: Path) -> Kubectl:
    made = Kubectl(tuple(kubectl(apiserver)))
    installed(made, CRD)
    installed(made, SCALE_CRD)
    return made


@pytest.fixture(scope="session")
def api(apiserver: Path, ctl: Kubectl) -> Api:
    del ctl  # has installed the CRDs
    return Api(apiserver)
