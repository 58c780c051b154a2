"""Launches of steps, and the table of predicted times in docs/gpu.md. Kernels are not interpreted here, and none is compiled."""

from pathlib import Path

import pytest

from tests.engine.kernels.compiled import in_compiler

pytest.importorskip("triton")

PREDICTED = Path(__file__).parents[2] / "docs" / "gpu.md"


def layer_of(what: str, quantization: str | None) -> list[str]:
    from bench.gpu import tape

    return tape.predict("Llama-3-8B", tape.STEPS[what], quantization).layer


def whole_table() -> str:
    from bench.gpu import tape

    return tape.table()


@pytest.mark.parametrize(("quantization", "budget"), [(None, 10), ("fp8", 11)])
def test_a_layer_launches_no_more_than_it_must(quantization: str | None, budget: int) -> None:
    """Rows are rounded by norms and gates. Only those behind attention take a launch more."""
    launches = in_compiler(layer_of, "decode, 1 row of 1,024 tokens", quantization)
    assert len(launches) <= budget, launches
    assert launches.count("_round_rows") == (quantization is not None)


@pytest.mark.whole
def test_the_documented_predictions_are_those_of_the_code() -> None:
    assert in_compiler(whole_table) in PREDICTED.read_text()
