"""The ranks that tokens are sent to, and the rows that carry them."""

import pytest
import torch
from starling_engine.expert_parallel.exchange import ExpertRoutes, TokenRows

CPU = torch.device("cpu")


def test_a_token_goes_to_the_rank_that_holds_its_expert() -> None:
    routes = ExpertRoutes(((0, 3), (1,), (2,)), 4, CPU)
    assert routes.choose(torch.tensor([[0, 1], [3, 2]]), 7).tolist() == [[0, 1], [0, 2]]
    assert routes.choose(torch.empty(0, 2, dtype=torch.int64), 0).shape == (0, 2)


def test_copies_take_turns() -> None:
    routes = ExpertRoutes(((0, 1), (0, 2), (0, 1)), 3, CPU)
    ids = torch.tensor([[0, 1]] * 6)
    assert routes.choose(ids, 0).tolist() == [[0, 0], [1, 2], [2, 0], [0, 2], [1, 0], [2, 2]]
    assert routes.choose(ids[:2], 1).tolist() == [[1, 2], [2, 0]]
    assert routes.choose(torch.tensor([[2]] * 3), 0).tolist() == [[1], [1], [1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("hidden", "top_k"), [(64, 8), (7, 1), (50, 3)])
def test_a_row_holds_all_of_a_token(dtype: torch.dtype, hidden: int, top_k: int) -> None:
    rows = TokenRows(hidden, dtype, top_k)
    x, ids, weights = torch.randn(5, hidden).to(dtype), torch.randint(-1, 300, (5, top_k)), torch.rand(5, top_k)
    packed = rows.pack(x, ids, weights)
    assert packed.shape == (5, rows.size) and rows.size < hidden * dtype.itemsize + 8 * top_k + 16
    found = rows.unpack(packed[1:])
    assert torch.equal(found[0], x[1:]) and torch.equal(found[1], ids[1:].int()) and torch.equal(found[2], weights[1:])
