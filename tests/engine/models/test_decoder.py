"""The decoder against transformers: same checkpoint, same logits, same greedy tokens; however the prompt is cut."""

import pytest
import torch
from starling_engine.attention.base import AttentionBackend
from starling_engine.attention.mla_torch import TorchMla
from starling_engine.layers.linear_select import select_linear_method
from starling_engine.model_config.config import load_model_config
from starling_engine.models import mlp
from starling_engine.models.decoder import Decoder
from starling_engine.weights.loader import load_weights

from tests.engine.checkpoints import PROMPT, VARIANTS, Reference
from tests.engine.models.conftest import ReferenceOf
from tests.engine.paged_driver import PagedDriver

CPU = torch.device("cpu")
TOLERANCE = 1e-4


def build(reference: Reference, backend: AttentionBackend, dtype: torch.dtype = torch.float32) -> Decoder:
    config = load_model_config(reference.folder)
    model = Decoder(config, dtype, CPU, select_linear_method(dtype, CPU), TorchMla() if config.mla else backend)
    load_weights(model, reference.folder)
    return model


def assert_same_greedy(tokens: list[int], reference: Reference) -> None:
    """Equal, or first different where the reference itself can hardly tell its two best apart."""
    for step, (ours, theirs) in enumerate(zip(tokens, reference.tokens, strict=True)):
        if ours != theirs:
            best, second = reference.logits[PROMPT + step - 1].topk(2).values.tolist()
            assert best - second <= TOLERANCE, f"step {step}: {ours} instead of {theirs}"
            return


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.matrix
def test_logits_and_greedy_tokens_equal_the_reference(name: str, backend: AttentionBackend, reference_of: ReferenceOf) -> None:
    reference = reference_of(name)
    driver = PagedDriver(build(reference, backend), torch.float32, block_size=16)
    (logits,) = driver.run([(0, reference.prompt)])
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, reference.logits[:PROMPT], atol=TOLERANCE, rtol=0)
    assert_same_greedy(driver.greedy(int(logits[-1].argmax()), len(reference.tokens)), reference)


@pytest.mark.parametrize("chunks", [[1] * PROMPT, [7, 8, 9, 16], [39, 1], [3, 37]], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "llama3.1",
        "qwen2-mixed",
        "mistral-window",
        "qwen3-moe",
        "mixtral-window",
        "gpt-oss",
        "deepseek-v2-lite-dense",
        "deepseek-v3",
        "qwen3-next",
        "qwen3.5",
    ],
)
@pytest.mark.matrix
def test_chunks_of_a_prompt_do_not_change_the_logits(
    name: str, chunks: list[int], backend: AttentionBackend, reference_of: ReferenceOf
) -> None:
    reference = reference_of(name)
    driver = PagedDriver(build(reference, backend), torch.float32, block_size=8)
    found, start = [], 0
    for size in chunks:
        found += driver.run([(0, reference.prompt[start : start + size])])
        start += size
    torch.testing.assert_close(torch.cat(found), reference.logits[:PROMPT], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3-mixed", "ministral-mixed", "qwen3-moe-some-plain", "deepseek-v2-dense", "deepseek-v3"]
)
def test_sequences_in_one_step_do_not_disturb_each_other(name: str, backend: AttentionBackend, reference_of: ReferenceOf) -> None:
    """Decoding rows beside prefill chunks of other lengths."""
    reference = reference_of(name)
    whole = reference.prompt + reference.tokens
    driver = PagedDriver(build(reference, backend), torch.float32, block_size=8, sequences=3)
    plan = [[(0, 33)], [(0, 1), (1, 5)], [(2, 21), (0, 1), (1, 40)], [(1, 1), (2, 1), (0, 1)], [(2, 60), (1, 2)]]
    for step in plan:
        starts = {row: driver.lengths[row] for row, _ in step}
        found = driver.run([(row, whole[starts[row] : starts[row] + count]) for row, count in step])
        for (row, count), logits in zip(step, found, strict=True):
            expected = reference.logits[starts[row] : starts[row] + count]
            torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["qwen3-mixed", "llama3.1", "mixtral", "deepseek-v3"])
def test_tokens_that_nobody_samples_from_may_be_left_out(name: str, backend: AttentionBackend, reference_of: ReferenceOf) -> None:
    reference = reference_of(name)
    driver = PagedDriver(build(reference, backend), torch.float32, block_size=8, sequences=2)
    found = driver.run_to_last([(0, reference.prompt), (1, reference.prompt[:11])])
    torch.testing.assert_close(found, reference.logits[[PROMPT - 1, 10]], atol=TOLERANCE, rtol=0)
    assert driver.run_to_last([(0, reference.tokens[:1])]).argmax(-1).tolist() == reference.tokens[1:2]


def test_an_mlp_in_pieces_gives_the_same(
    backend: AttentionBackend, reference_of: ReferenceOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlp, "CACHED_ROWS", 16)
    reference = reference_of("qwen3")
    (logits,) = PagedDriver(build(reference, backend), torch.float32, block_size=16).run([(0, reference.prompt)])
    torch.testing.assert_close(logits, reference.logits[:PROMPT], atol=TOLERANCE, rtol=0)


DENSE = ("llama3.1", "qwen2", "qwen3-tied", "mistral-window", "deepseek-v2-lite-dense", "deepseek-v3-dense", "qwen3.5")
EXPERTS = ("qwen3-moe", "mixtral", "gpt-oss", "deepseek-v2-lite", "deepseek-v3", "qwen2-moe", "qwen3-next")


@pytest.mark.parametrize(
    ("dtype", "least", "name"),
    [
        *((torch.bfloat16, 0.85, name) for name in DENSE),
        *((torch.float16, 0.97, name) for name in DENSE),
        *((dtype, 0.75, name) for dtype in (torch.bfloat16, torch.float16) for name in EXPERTS),
    ],
    ids=str,
)
@pytest.mark.matrix
def test_half_precision_agrees_in_its_first_choice(
    name: str, dtype: torch.dtype, least: float, backend: AttentionBackend, reference_of: ReferenceOf
) -> None:
    """The reference in bf16 agrees with itself in fp32 at 0.95 to 0.99 of these positions.

    With experts it is 0.90: a token that goes to the other of two experts as good changes all tokens after it. Which tokens those
    are depends on the order in which a CPU adds up: their bound leaves room for more of them.
    """
    if dtype == torch.float16 and backend.name == "native":
        pytest.skip("no native kernels for float16")
    reference = reference_of(name, dtype)
    driver = PagedDriver(build(reference, backend, dtype), dtype, block_size=16)
    (logits,) = driver.run([(0, reference.prompt + reference.tokens)])
    agreement = (logits.argmax(-1) == reference.logits.argmax(-1)).double().mean().item()
    print(f"{name}: {agreement:.3f}")
    assert agreement >= least


def test_each_layer_ticks_once(backend: AttentionBackend, reference_of: ReferenceOf) -> None:
    driver = PagedDriver(build(reference_of("qwen3"), backend), torch.float32, block_size=16)
    driver.run([(0, [1, 2, 3])])
    assert driver.ticks == 3
