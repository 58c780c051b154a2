"""Fixtures of the model tests: references by transformers, made once a session, and what computes here."""

from collections.abc import Callable, Iterator

import pytest
import torch
from starling_engine import native
from starling_engine.attention.base import AttentionBackend
from starling_engine.attention.native_cpu import NativeAttention
from starling_engine.attention.torch_paged import TorchPagedAttention

from tests.engine.checkpoints import FAMILIES, VARIANTS, Reference, make_reference

VARIANT_STEPS, FAMILY_STEPS = 44, 14
"""Tokens that a reference decodes: past the end of a block, and, of variants, as many as steps of several sequences take."""
ReferenceOf = Callable[..., Reference]


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(min(2, before))
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["torch", "native"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AttentionBackend:
    """Also decides what the other layers run on: "torch" is a machine without native kernels."""
    if request.param == "torch":
        monkeypatch.setattr(native, "load", lambda: None)
        return TorchPagedAttention()
    if native.load() is None:
        pytest.skip("this machine has no native kernels")
    return NativeAttention()


@pytest.fixture(scope="session")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> ReferenceOf:
    made: dict[tuple[str, torch.dtype], Reference] = {}

    def get(name: str, dtype: torch.dtype = torch.float32) -> Reference:
        if (name, dtype) not in made:
            variant, steps = (VARIANTS[name], VARIANT_STEPS) if name in VARIANTS else (FAMILIES[name], FAMILY_STEPS)
            made[name, dtype] = make_reference(tmp_path_factory.mktemp("checkpoint"), variant, dtype, steps)
        return made[name, dtype]

    return get
