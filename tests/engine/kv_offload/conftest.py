"""Limits that a busy machine does not reach, for tests of KV offload."""

import pytest
from starling_engine.kv_offload import policies
from starling_engine.kv_offload.secondary.folder import tier as folder_tier


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine's disk may stand still for longer than a tier waits, or than a lookup pays.

    test_outage.py, test_lookups.py and test_policies.py are about what happens then.
    """
    if request.path.name not in ("test_lookups.py", "test_policies.py"):
        monkeypatch.setattr(policies, "PATIENCE", 120.0)
    if request.path.name != "test_outage.py":
        for limit in ("SLOW_READ", "SLOW_WRITE"):
            monkeypatch.setattr(folder_tier, limit, 120.0)
