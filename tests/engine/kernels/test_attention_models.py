"""The Triton backend where models use it: against transformers, and against attention written out in full."""

from pathlib import Path

import pytest
import torch
from starling_engine import SamplingParams
from starling_engine.attention.base import AttentionBackend
from starling_engine.platforms.triton_support import INTERPRETED

from tests.engine.attention.test_paged import test_a_token_without_a_slot_stores_nothing  # noqa: F401
from tests.engine.attention.test_paged import test_equals_attention_written_out as _written_out
from tests.engine.checkpoints import FAMILIES, PROMPT, VARIANTS, make_reference
from tests.engine.models.test_decoder import TOLERANCE, build
from tests.engine.paged_driver import PagedDriver
from tests.engine.real_engine import running
from tests.engine.written import write_tokenizer

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="these put their tensors on the CPU, and the kernels are compiled here"
)

STEPS = 6


@pytest.fixture
def backend() -> AttentionBackend:
    from starling_engine.attention.triton_paged import TritonAttention

    return TritonAttention()


@pytest.mark.parametrize("name", ["one for all", "head norms", "half rotated", "sinks"])
def test_equals_attention_written_out(name: str, backend: AttentionBackend) -> None:
    _written_out(name, torch.float32, 1e-5, backend)


@pytest.mark.parametrize("name", ["qwen3", "mistral-window", "gemma4-inputs"])
def test_logits_and_greedy_tokens_equal_the_reference(name: str, backend: AttentionBackend, tmp_path: Path) -> None:
    """Full attention with head norms, a sliding window, and layers that read another one's cache.

    The prompt comes in two chunks, the second beside another sequence.
    """
    reference = make_reference(tmp_path, {**VARIANTS, **FAMILIES}[name])
    driver = PagedDriver(build(reference, backend), torch.float32, block_size=16, sequences=2)
    (first,) = driver.run([(0, reference.prompt[:23])])
    second, other = driver.run([(0, reference.prompt[23:]), (1, reference.prompt[:1])])
    torch.testing.assert_close(torch.cat([first, second]), reference.logits[:PROMPT], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(other, reference.logits[:1], atol=TOLERANCE, rtol=0)
    assert driver.greedy(int(second[-1].argmax()), STEPS) == reference.tokens[:STEPS]


async def test_an_engine_that_is_asked_for_it_answers_as_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERPRETED, "1")
    reference = make_reference(tmp_path, VARIANTS["qwen3-mixed"])
    write_tokenizer(tmp_path)
    params = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True)
    async with running(model=str(tmp_path), attention_backend="triton") as engine:
        output = await engine.complete(reference.prompt, params)
    assert list(output.outputs[0].token_ids) == reference.tokens[:STEPS]
