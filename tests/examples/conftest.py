"""An API server for `kubectl apply --dry-run=server`, and `starling up` for the rest."""

import pytest

from tests.kube.apiserver import apiserver
from tests.operator.commands.conftest import crd
from tests.operator.local.conftest import up

__all__ = ["apiserver", "crd", "up"]


@pytest.fixture
def examples():
    from tests.operator.local.running import REPOSITORY

    return REPOSITORY / "examples"
