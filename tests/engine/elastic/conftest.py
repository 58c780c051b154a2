import pytest

from tests.engine.checkpoints import VARIANTS, Reference, make_reference


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A model of experts, and what transformers answers."""
    return make_reference(tmp_path_factory.mktemp("checkpoint"), VARIANTS["qwen3-moe"])
