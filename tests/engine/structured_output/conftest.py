"""The official test suite of JSON Schema, which `make schemas` unpacks."""

import os
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("STARLING_CACHE") or Path.home() / ".cache" / "starling")
SUITE = CACHE / "json-schema-test-suite-4.26.0" / "draft2020-12"


@pytest.fixture
def suite() -> Path:
    """The folder of the suite's files for draft 2020-12."""
    if not SUITE.is_dir():
        pytest.skip("`make schemas` unpacks JSON Schema's test suite, where it can be downloaded")
    return SUITE
