"""A namespace for each scenario, and what every scenario does to a service."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from e2e.service.kubectl import Kubectl
from e2e.service.watched import Watched
from e2e.under_test import ClusterUnderTest

MakeService = Callable[..., Watched]
"""make(name="chat", **spec) applies a service and returns it."""

_numbers = itertools.count(1)


@pytest.fixture
def kubectl(cluster: ClusterUnderTest, operator: str, request: pytest.FixtureRequest) -> Iterator[Kubectl]:
    """In a namespace of its own that enforces restricted Pod Security; gone afterwards."""
    del operator  # it has to run, nothing more
    name = f"e2e-{next(_numbers)}"
    anywhere = Kubectl(cluster.kubectl, cluster.kubeconfig)
    anywhere("create", "namespace", name)
    anywhere("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    own = Kubectl(cluster.kubectl, cluster.kubeconfig, name)
    failed_before = request.session.testsfailed
    yield own
    if request.session.testsfailed > failed_before:
        print(own("get", "all,infsvc,events", "-o", "wide", check=False))
    anywhere("delete", "namespace", name, "--wait=false")


@pytest.fixture
def service(kubectl: Kubectl) -> MakeService:

    def make(name: str = "chat", **spec: Any) -> Watched:
        watched = Watched(kubectl, name)
        watched.apply(**spec)
        return watched

    return make
