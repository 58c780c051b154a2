"""An API server for `kubectl apply --dry-run=server`, and `starling up` for the rest."""

import pytest

from tests.cli.commands.conftest import crd
from tests.cli.local.conftest import up
from tests.kube.apiserver import apiserver

__all__ = ["apiserver", "crd", "up"]


@pytest.fixture
def examples():
    from tests.cli.local.running import REPOSITORY

    return REPOSITORY / "examples"
