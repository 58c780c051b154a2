"""Ranks in processes of their own that sum through each other's memory: two of them can share one card."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
import torch
from starling_engine.parallel.gloo import GlooCommunicator, join_store, serve_store
from starling_engine.parallel.one_shot import MAX_BYTES, join_one_shot
from starling_engine.topology.rendezvous import Rendezvous
from starling_engine.topology.shard import Shard

RANKS, SECONDS = 2, 60.0
SIZES = [1, 4099, MAX_BYTES // 4, 64, 64, 7]


def part(rank: int, turn: int) -> torch.Tensor:
    return torch.randn(SIZES[turn % len(SIZES)], generator=torch.Generator().manual_seed(1000 * rank + turn))


def rank_sums(rank: int, place: Rendezvous, turns: int) -> list[npt.NDArray[np.float32]]:
    """The sums of `turns` rounds, then what three replays of a captured sum give."""
    device = torch.device("cuda")
    host = GlooCommunicator(join_store(place), "ranks", Shard(rank, RANKS), place, lambda: None)
    ranks = join_one_shot(host, device)
    assert ranks is not None, "the log says why"
    found = [ranks.all_reduce(part(rank, turn).to(device)).cpu().numpy() for turn in range(turns)]
    x, graph = torch.empty(512, device=device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ranks.all_reduce(x)
    for replay in range(3):
        x.fill_(rank + replay)
        graph.replay()
        found.append(x.cpu().numpy())
    host.all_gather(torch.zeros(1))  # nobody's memory goes while another reads it
    return found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_processes_that_share_a_card():
    store, turns = serve_store("127.0.0.1", SECONDS), 60
    place = Rendezvous("127.0.0.1", store.port, "127.0.0.1", SECONDS)
    with ProcessPoolExecutor(RANKS, multiprocessing.get_context("spawn")) as processes:
        calls = [processes.submit(rank_sums, rank, place, turns) for rank in range(RANKS)]
        try:
            first, second = (call.result(timeout=100) for call in calls)
        except BaseException:  # the kernel of one that is left waits for the other without end
            for process in processes._processes.values():
                process.kill()
            raise
    expected = [(part(0, turn) + part(1, turn)).numpy() for turn in range(turns)]
    expected += [np.full(512, 2.0 * replay + 1, np.float32) for replay in range(3)]
    for each in (first, second):
        for found, wanted in zip(each, expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
