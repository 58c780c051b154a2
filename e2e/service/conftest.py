"""What every scenario begins with."""

from collections.abc import Callable
from typing import Any

import pytest

from e2e.service.kubectl import Kubectl
from e2e.service.watched import Watched

MakeService = Callable[..., Watched]
"""make(name="chat", **spec) applies a service and returns it."""


@pytest.fixture
def service(kubectl: Kubectl) -> MakeService:

    def make(name: str = "chat", **spec: Any) -> Watched:
        watched = Watched(kubectl, name)
        watched.apply(**spec)
        return watched

    return make
