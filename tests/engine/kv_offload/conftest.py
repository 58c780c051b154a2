"""What tests of the tiers share."""

import pytest
from starling_engine.kv_offload import costs
from starling_engine.kv_offload.secondary.folder import outage


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine's disk may stand still for longer than a tier waits, or than asking it pays; what happens then is the matter
    of test_outage, and of test_asking.
    """
    monkeypatch.setattr(costs, "PATIENCE", 120.0)
    if request.path.name != "test_outage.py":
        for limit in ("SLOW_READ", "SLOW_WRITE"):
            monkeypatch.setattr(outage, limit, 120.0)
