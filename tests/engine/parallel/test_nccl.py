"""Ranks with a device each. NCCL needs two GPUs, so its calls run over gloo's process group, which has the same."""

from datetime import timedelta

import pytest
import torch
from starling_engine.layers.embedding import Vocabulary
from starling_engine.layers.linear import Linear, stacked
from starling_engine.layers.linear_dense import DenseLinear
from starling_engine.parallel.communicator import Communicator, SingleRank
from starling_engine.parallel.gloo import serve_store
from starling_engine.parallel.nccl import NcclCommunicator, join_nccl
from starling_engine.parallel.peer_sums import MAX_BYTES, PeerSums
from starling_engine.topology.rendezvous import Rendezvous
from starling_engine.topology.shard import Shard
from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroupGloo

from tests.engine.parallel.threads import on_ranks

CPU = torch.device("cpu")


class Host(SingleRank):
    """Keeps what it is given."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.given: list[torch.Tensor] = []

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.given.append(x)
        return x


def on_devices(count, work):
    """`work` for each rank, whose "device" is the CPU and whose group is gloo's."""
    store = HashStore()

    def rank(ranks: Communicator):
        group = ProcessGroupGloo(PrefixStore("device", store), ranks.shard.index, ranks.shard.count, timedelta(seconds=20))
        return work(NcclCommunicator(Host(ranks.shard), group, CPU))

    return on_ranks(count, "gloo", rank)


def test_sums_and_gathers_are_the_groups():
    def work(ranks):
        own = torch.full((2, 3), float(ranks.shard.index + 1))
        # Of every second row: a view is summed as well.
        return ranks.all_gather(own.clone()), ranks.all_reduce(own.repeat(2, 1)[::2])

    for gathered, summed in on_devices(2, work):
        assert gathered.shape == (2, 2, 3)
        assert gathered[:, 0, 0].tolist() == [1, 2]
        assert summed.tolist() == [[3.0] * 3] * 2


def test_each_rank_gets_what_is_meant_for_it():
    sizes = [[1, 2], [0, 3]]

    def work(ranks):
        me = ranks.shard.index
        x = torch.arange(sum(sizes[me])) + 10 * me
        return ranks.all_to_all(x, sizes[me], [row[me] for row in sizes])()

    first, second = on_devices(2, work)
    assert first.tolist() == [0]
    assert second.tolist() == [1, 2, 10, 11, 12]


def test_what_is_sent_arrives_in_its_order():
    def work(ranks):
        if ranks.shard.first:
            for number in range(9):
                ranks.send(torch.full((4,), float(number)), 1)
        found = [] if ranks.shard.first else [float(ranks.receive(torch.empty(4), 0)[0]) for _ in range(9)]
        ranks.all_gather(torch.zeros(1))  # nobody leaves while something is on its way
        return found

    assert on_devices(2, work)[1] == list(range(9))


@pytest.mark.parametrize("kind", ["device", "gloo"])
def test_parts_of_a_sum_are_sent_in_the_models_dtype_between_devices_and_in_fp32_between_hosts(kind):
    """A matrix whose columns, and a vocabulary whose rows, two ranks share: both as one rank alone has them, but for rounding."""
    weight, x, ids = (torch.randn(64, 32) / 8).bfloat16(), torch.randn(3, 32).bfloat16(), torch.tensor([40, 0, 63])
    store = HashStore()

    def work(ranks: Communicator):
        if kind == "device":
            group = ProcessGroupGloo(PrefixStore("device", store), ranks.shard.index, ranks.shard.count, timedelta(seconds=20))
            ranks = NcclCommunicator(Host(ranks.shard), group, CPU)
        sum_up, dtypes = ranks.all_reduce, []
        ranks.all_reduce = lambda part: (dtypes.append(part.dtype), sum_up(part))[1]
        columns = ranks.shard.of(32)
        layer = Linear(stacked(["o"], [64], columns), DenseLinear(), torch.bfloat16, CPU, ranks)
        layer.weight_slots()["o.weight"].load(weight[:, columns.slice])
        vocabulary = Vocabulary(64, ranks)
        found = layer.forward(x[:, columns.slice]), vocabulary.lookup(weight[vocabulary.share.slice].__getitem__)(ids)
        return found, layer.forward(x[:, columns.slice], torch.float32).dtype, dtypes

    for (product, rows), asked, dtypes in on_ranks(2, "gloo", work):
        torch.testing.assert_close(product.float(), x.float() @ weight.float().T, atol=0.02, rtol=0.02)
        assert product.dtype == torch.bfloat16 and torch.equal(rows, weight[ids]) and asked == torch.float32
        assert dtypes == [*[torch.bfloat16 if kind == "device" else torch.float32] * 2, torch.float32]


def test_what_is_not_on_the_device_goes_by_the_host():
    host = Host(Shard(0, 2))
    ranks = NcclCommunicator(host, None, torch.device("cuda"))
    x = torch.ones(3)
    assert ranks.all_reduce(x) is x and host.given == [x]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_calls_of_one_gpu_are_recorded() -> None:
    """A rank alone exchanges nothing, but NCCL takes the same calls from it."""
    device = torch.device("cuda", 0)
    store = serve_store("127.0.0.1", 10.0)
    place = Rendezvous("127.0.0.1", store.port, "127.0.0.1", 10.0)
    ranks = join_nccl(Host(Shard(0, 1)), store, "one", place, device)
    x = torch.ones(4, 8, device=device)
    ranks.all_reduce(x), ranks.all_gather(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        summed, gathered = ranks.all_reduce(x), ranks.all_gather(x)
    x.fill_(3)
    graph.replay()
    assert summed.tolist() == [[3.0] * 8] * 4 and gathered.shape == (1, 4, 8) and gathered.min() == gathered.max() == 3
    assert ranks.all_to_all(x, [4], [4])().tolist() == x.tolist()
    ranks.close()


@pytest.mark.parametrize(
    ("x", "takes"),
    [
        (torch.ones(8), True),
        (torch.ones(8, dtype=torch.bfloat16), True),
        (torch.ones(MAX_BYTES // 4), True),
        (torch.ones(MAX_BYTES // 4 + 1), False),
        (torch.ones(8, dtype=torch.int64), False),
        (torch.ones(8, 2)[:, 0], False),
        (torch.ones(0), False),
    ],
)
def test_sums_that_are_not_large_take_one_kernel(x, takes):
    assert PeerSums(torch.zeros(2, dtype=torch.int64), 0).takes(x) is takes
