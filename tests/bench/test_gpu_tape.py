"""Launches of steps, and the table of predicted times in docs/gpu.md. Kernels are not interpreted here, and none is compiled."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.kernels.compiled import in_compiler

pytest.importorskip("triton")

PREDICTED = Path(__file__).parents[2] / "docs" / "gpu.md"


def layer_of(what: str, quantization: str | None) -> list[str]:
    from bench.gpu import tape

    return tape.predict("Llama-3-8B", tape.STEPS[what], quantization).layer


def layer_of_ranks(what: str, ranks: int, quantization: str | None) -> list[str]:
    from bench.gpu import tape

    return tape.predict("Llama-3-8B", tape.STEPS[what], quantization, ranks=ranks).layer


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


MATRICES = [(4096, 1024), (4096, 4096), (6144, 4096), (4096, 16384), (16384, 7168), (65536, 8192)]
MEASURED = {
    ("H200", 1): [5.4, 12.6, 16.5, 35.6, 56.7, 263.7],
    ("H200", 64): [5.4, 12.7, 17.4, 40.5, 58.5, 287.7],
    ("H200", 512): [9.1, 25.3, 36.1, 90.3, 162.0, 753.9],
    ("H200", 8192): [100.0, 381.8, 508.7, 1479.6, 2457.0, 12550.5],
    ("H100", 1): [6.0, 15.8, 22.1, 49.5, 82.6, 376.8],
    ("H100", 64): [6.2, 15.7, 23.1, 56.3, 89.5, 392.9],
    ("H100", 512): [9.1, 24.8, 36.4, 89.4, 157.1, 745.4],
    ("H100", 8192): [97.5, 347.0, 535.7, 1481.1, 2474.0, 12254.2],
}
"""Microseconds of products by cuBLAS in bf16, by device and rows, for matrices of so many columns and so deep.

From one launch to the next of a recording: medians of SGLang 0.5.14, TensorRT-LLM 1.3.0rc20 and vLLM 0.24.0, as aiconfigurator-core
0.12.0 has them.
"""

OF_ONE_ROW = {(2560, 4096): 9.31, (2560, 9216): 16.64, (10240, 2560): 17.73, (12288, 2560): 19.45, (18432, 2560): 27.59}
"""The same of one row by a kernel in Triton that begins early, on a GH200 (SamMausberg/verified-progress, evidence/backbone)."""


def products() -> dict[tuple[str, int], list[float]]:
    """Returns what the tape expects for those by cuBLAS."""
    from bench.gpu import tape

    def seconds(device: str, rows: int, columns: int, depth: int) -> float:
        x, weight, out = meta(rows, depth), meta(columns, depth), meta(rows, columns)
        return tape._of_operation("linear", (x, weight), out).expected(tape.DEVICES[device])

    return {key: [1e6 * seconds(*key, *matrix) for matrix in MATRICES] for key in MEASURED}


def products_of_one_row() -> list[float]:
    """Returns what it expects of ours, were a GH200's copy to reach as much of its bandwidth as that of an H200 does."""
    from bench.gpu import tape
    from bench.gpu.roofline import StepRow

    def seconds(columns: int, depth: int) -> float:
        tensors = {"x": meta(1, depth), "weight": meta(columns, depth), "out": meta(1, columns)}
        launch = tape._of_kernel("_few_rows", tensors, [StepRow(1, 1)])
        return replace(launch, overlaps=True).expected(tape.Rates(3.6e12, 790e12, 1580e12))

    return [1e6 * seconds(*matrix) for matrix in OF_ONE_ROW]


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


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


def times_of_ranks() -> str:
    from bench.gpu import tape

    return tape.shared()


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


@pytest.mark.parametrize(
    ("what", "ranks", "quantization", "budget", "sums"),
    [
        (ONE, 2, None, 8, {"_one_shot_norm": 2}),
        (MANY, 4, None, 8, {"_one_shot_norm": 2}),
        (MANY, 2, "fp8", 9, {"_one_shot_norm": 2}),
        (MANY, 8, None, 10, {"_two_shots": 2, "_rms_norm_rows": 2}),
        (MOST, 2, None, 10, {"_one_shot": 2, "_rms_norm_rows": 2}),
    ],
)
def test_ranks_sum_and_take_the_norm_in_one_launch(
    what: str, ranks: int, quantization: str | None, budget: int, sums: dict[str, int]
) -> None:
    """Products of few rows are cuBLAS's: none of a rank can add to the residual."""
    layer = in_compiler(layer_of_ranks, what, ranks, quantization)
    assert len(layer) <= budget, layer
    assert {
        name: layer.count(name) for name in ("_one_shot_norm", "_one_shot", "_two_shots", "_rms_norm_rows") if name in layer
    } == sums


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


def test_products_are_expected_to_take_what_others_have_measured() -> None:
    for key, expected in in_compiler(products).items():
        assert expected == pytest.approx(MEASURED[key], rel=0.15), key


def test_products_of_one_row_are_expected_to_take_what_such_a_kernel_has_taken() -> None:
    assert in_compiler(products_of_one_row) == pytest.approx(list(OF_ONE_ROW.values()), rel=0.03)


def test_the_documented_predictions_are_those_of_the_code() -> None:
    assert in_compiler(expected_times) in PREDICTED.read_text()


def test_the_documented_times_of_ranks_are_those_of_the_code() -> None:
    assert in_compiler(times_of_ranks) in PREDICTED.read_text()


@pytest.mark.whole  # weights in fp8 take seconds
def test_the_documented_least_times_are_those_of_the_code() -> None:
    assert in_compiler(least_times) in PREDICTED.read_text()
