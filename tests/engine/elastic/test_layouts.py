"""Experts over the ranks of several engine cores: every layout gives what transformers gives."""

import pytest

from tests.engine.checkpoints import Reference
from tests.engine.cores import assert_greedy
from tests.engine.elastic.groups import GREEDY, complete, complete_many, group

WHOLE = pytest.mark.whole
LAYOUTS = [
    pytest.param(2, 1, 1, marks=WHOLE),
    pytest.param(4, 1, 1, marks=WHOLE),
    (2, 2, 1),
    pytest.param(2, 1, 2, marks=WHOLE),
    (3, 1, 1),
]


@pytest.mark.parametrize(("data", "tensor", "pipeline"), LAYOUTS)
async def test_the_same_greedy_tokens(reference: Reference, data: int, tensor: int, pipeline: int) -> None:
    sizes = {"data_parallel_size": data, "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    async with group(reference, **sizes, max_num_seqs=8) as engine:
        assert_greedy(await complete(engine, reference), reference)
        for tokens in await complete_many(engine, reference, 6):
            assert_greedy(tokens, reference)
        assert (await engine.complete(reference.prompt, GREEDY)).num_cached_tokens
        assert engine.cores.membership.layout.data == data
