"""The cases of bench/gpu.sh can be called, each at its tiny size."""

import pytest

from bench.gpu import cases_attention, cases_experts, cases_rows
from bench.gpu.case import Case

CASES = [case for module in (cases_attention, cases_rows, cases_experts) for case in module.cases(toy=True)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_a_case_runs(case: Case, device):
    assert case.cost.bytes > 0
    for make in (case.make, *case.rivals.values()):
        make(device)()
