"""Launches of steps, and the table of predicted times in docs/gpu.md. Kernels are not interpreted here, and none is compiled."""

from pathlib import Path

import pytest
import torch

from tests.engine.kernels.compiled import in_compiler

pytest.importorskip("triton")

PREDICTED = Path(__file__).parents[2] / "docs" / "gpu.md"


def layer_of(what: str, quantization: str | None) -> list[str]:
    from bench.gpu import tape

    return tape.predict("Llama-3-8B", tape.STEPS[what], quantization).layer


def launches_of(shape: str, what: str) -> tuple[list[str], list[str]]:
    """Returns what a layer launches, and what follows the last one."""
    from bench.gpu import tape

    found = tape.predict(shape, tape.STEPS[what])
    return found.layer, found.tail


ONE, MANY, MOST = "decode, 1 row of 1,024 tokens", "decode, 64 rows", "decode, 256 rows"
MIXED, PROMPT = "64 rows and 448 tokens of a prompt", "prompt of 8,192 tokens"
LIBRARY = f"{PROMPT}, by FlashAttention-3"
DENSE = {ONE: 5, MANY: 8, MOST: 8, MIXED: 10, PROMPT: 9, LIBRARY: 11}
BUDGETS = {
    "Qwen3-0.6B": DENSE,
    "Llama-3-8B": DENSE,
    "30B-A3B": {ONE: 11, MANY: 12, MOST: 13, MIXED: 15, PROMPT: 14, LIBRARY: 16},
    "DeepSeek-V3": {ONE: 23, MANY: 25, MOST: 26, MIXED: 26, PROMPT: 72},
}
"""The most launches of a layer, of those with experts where some have none."""
TAIL = 5


def all_launches() -> dict[tuple[str, str], tuple[list[str], list[str]]]:
    return {(shape, what): launches_of(shape, what) for shape, steps in BUDGETS.items() for what in steps}


def launches_of_views() -> list[str]:
    """Returns the launches of calls that may or may not give the same memory: a cast and a copy, then four that do."""
    from bench.gpu import tape

    x = torch.empty(4, 4, device="meta")
    with torch.inference_mode(), tape._written_down([]) as found:
        _ = x.half(), x.T.contiguous()
        _ = x.float(), x.contiguous(), x.view(16), x[1:]
    return [each.name for each in found]


def expected_times() -> str:
    from bench.gpu import tape

    return tape.expectations()


def least_times() -> str:
    from bench.gpu import tape

    return tape.table()


@pytest.mark.parametrize(("quantization", "budget"), [(None, 5), ("fp8", 9)])
def test_a_layer_launches_no_more_than_it_must(quantization: str | None, budget: int) -> None:
    """Rows are rounded by norms and gates. Only those behind attention take a launch more."""
    launches = in_compiler(layer_of, "decode, 1 row of 1,024 tokens", quantization)
    assert len(launches) <= budget, launches
    assert launches.count("_round_rows") == (quantization is not None)


@pytest.mark.parametrize(
    ("shape", "what", "budget"),
    [
        ("Llama-3-8B", "decode, 64 rows", 8),
        pytest.param("30B-A3B", "decode, 1 row of 1,024 tokens", 11, marks=pytest.mark.whole),
        pytest.param("30B-A3B", "decode, 64 rows", 12, marks=pytest.mark.whole),
        ("DeepSeek-V3", "decode, 1 row of 1,024 tokens", 24),
        pytest.param("DeepSeek-V3", "decode, 64 rows", 25, marks=pytest.mark.whole),
    ],
)
def test_a_step_ends_in_few_launches(shape: str, what: str, budget: int) -> None:
    """The norm, the head, filters in two, the draw, and what takes its tokens. One row has a kernel of its own for the head."""
    layer, tail = in_compiler(launches_of, shape, what)
    head = "_few_rows" if "1 row" in what else "mm"
    assert tail[-5:] == [head, "_survey", "_thresholds", "_draw", "_accept"] and len(tail) == 5, tail
    assert len(layer) <= budget, layer


def test_a_step_with_prompts_attends_twice() -> None:
    """As it is recorded: with room for 257 rows, whose decodes are not split."""
    layer, _ = in_compiler(launches_of, "Llama-3-8B", "64 rows and 448 tokens of a prompt")
    assert layer.count("attention_kernel") == 2 and "_merge" not in layer and len(layer) <= 10, layer


def test_a_library_gathers_keys_and_values_and_attends_once() -> None:
    layer, _ = in_compiler(launches_of, "Llama-3-8B", "prompt of 8,192 tokens, by FlashAttention-3")
    assert layer.count("flash_attention_3") == 1 and layer.count("index") == 2 and "attention_kernel" not in layer, layer


def test_no_step_launches_more_than_its_budget() -> None:
    for (shape, what), (layer, tail) in in_compiler(all_launches).items():
        assert len(layer) <= BUDGETS[shape][what], (shape, what, layer)
        assert len(tail) <= TAIL, (shape, what, tail)


def test_a_cast_and_a_copy_are_launches() -> None:
    assert in_compiler(launches_of_views) == ["to", "contiguous"]


def test_the_documented_predictions_are_those_of_the_code() -> None:
    assert in_compiler(expected_times) in PREDICTED.read_text()


@pytest.mark.whole  # weights in fp8 take seconds
def test_the_documented_least_times_are_those_of_the_code() -> None:
    assert in_compiler(least_times) in PREDICTED.read_text()
