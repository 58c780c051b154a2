"""What tests of the tiers share."""

import pytest
from starling_engine.tiers.folder import outage


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine's disk may stand still for longer than a tier waits; what happens then is test_outage's matter."""
    if request.path.name != "test_outage.py":
        for limit in ("SLOW_READ", "SLOW_WRITE"):
            monkeypatch.setattr(outage, limit, 120.0)
