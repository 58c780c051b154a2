"""What tests and scenarios have in common."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="run the whole of each matrix and scenario, not the sample of it")
