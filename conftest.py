"""What tests and scenarios have in common."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="run the whole of each matrix and scenario, not the sample of it")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is marked as whole. It comes last: samples of matrices are taken from all of their cases."""
    if not config.getoption("--whole"):
        items[:] = [item for item in items if not item.get_closest_marker("whole")]
