"""Launches of steps, and the table of predicted times in docs/gpu.md. Kernels are not interpreted here, and none is compiled."""

from pathlib import Path

import pytest

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


def whole_tables() -> list[str]:
    from bench.gpu import tape

    return [tape.table(), tape.expectations()]


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


@pytest.mark.whole
def test_the_documented_predictions_are_those_of_the_code() -> None:
    for table in in_compiler(whole_tables):
        assert table in PREDICTED.read_text()
