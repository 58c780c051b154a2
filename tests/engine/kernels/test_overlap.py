"""Launches that begin before the one before them ends: what each may do before it waits, by the code for an H200."""

import pytest
import torch
from starling_engine.kernels.fused_rows import RowNorm
from starling_engine.kernels.overlap import overlaps

from tests.engine.kernels.compiled import compiled, in_compiler
from tests.engine.kernels.test_attention_compiled import launch_decode, launch_store

BF16 = torch.bfloat16
PREFETCH = "cp.async.bulk.prefetch.L2.global"


def launch_few_rows(depth: int) -> None:
    """Makes the first product of a part, behind a norm, and the last one, in place."""
    from starling_engine.kernels.few_rows import few_rows_linear

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=BF16, device="meta")

    few_rows_linear(empty(1, depth), empty(2048, depth), None, RowNorm(empty(depth), 1e-6), gated=True)
    few_rows_linear(empty(1, depth), empty(1024, depth), add_to=empty(1, 1024))


def overlapped(shape: str, what: str) -> list[tuple[str, bool]]:
    from bench.gpu import tape

    return tape.overlapped(shape, tape.STEPS[what])


def test_products_ask_for_weights_and_for_nothing_else_before_they_wait() -> None:
    """Of rows that are no multiple of 16 bytes they ask for nothing, as the copy takes no such."""
    for kernel in compiled(launch_few_rows, 4096):
        assert kernel.overlaps and set(kernel.before_waiting) == {PREFETCH}
    for kernel in compiled(launch_few_rows, 1001):
        assert kernel.overlaps and not kernel.before_waiting


@pytest.mark.parametrize("rows", [1, 64])
def test_attention_waits_before_it_does_anything(rows: int) -> None:
    (kernel,) = compiled(launch_decode, rows)
    assert kernel.overlaps and not kernel.before_waiting


def test_what_was_not_written_for_it_does_not_overlap() -> None:
    """It would read what the launch before it has not written yet. The wait is looked for in the code of such a kernel, too."""
    (store,) = compiled(launch_store)
    assert not store.overlaps and "griddepcontrol" not in store.ptx
    with pytest.raises(AssertionError, match="neither waits"):
        _ = store.before_waiting


def test_launches_of_a_step_that_overlap_are_those_that_are_tested() -> None:
    """All of a layer's launches begin early at one row. At 64 rows others lie between."""
    few, many = (in_compiler(overlapped, "Llama-3-8B", what) for what in ("decode, 1 row of 1,024 tokens", "decode, 64 rows"))
    assert {name for name, early in few + many if early} == {"_few_rows", "attention_kernel"}
    assert [name for name, early in few if name in ("_few_rows", "attention_kernel") and not early] == []


def test_nothing_overlaps_where_kernels_are_interpreted() -> None:
    assert not overlaps(torch.device("cpu"))
