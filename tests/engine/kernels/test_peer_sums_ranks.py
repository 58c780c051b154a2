"""Ranks in processes of their own that sum through each other's memory: two of them can share one card.

Where there is none, their kernels are interpreted, and the memory is a file that both map.
"""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from starling_engine.kernels.fused_rows import RowNorm
from starling_engine.parallel.gloo import GlooCommunicator, join_store, serve_store
from starling_engine.parallel.peer_sums import MAX_BYTES, PeerSums, join_peer_sums
from starling_engine.topology.rendezvous import Rendezvous
from starling_engine.topology.shard import Shard

RANKS, SECONDS = 2, 60.0
ROW = 64
SUMS = [("one shot", 1), ("two shots", 4099), ("norm", ROW), ("two shots", ROW), ("one shot", 7), ("norm", 8 * ROW)]
LARGE = [("one shot", MAX_BYTES // 4), ("two shots", MAX_BYTES // 4)]
"""Sums of these sizes are too much for the interpreter."""


def part(rank: int, turn: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * rank + turn))


def in_one_file(folder: Path, rank: int) -> PeerSums:
    """Maps the regions of all ranks, each of which is as it would be on a card."""
    from starling_engine.kernels.peer_sums import region_bytes

    files = [str(folder / str(each)) for each in range(RANKS)]
    regions = [torch.from_file(file, shared=True, size=region_bytes(RANKS), dtype=torch.uint8) for file in files]
    _mapped.extend(regions)
    return PeerSums(torch.tensor([region.data_ptr() for region in regions]), rank)


_mapped: list[torch.Tensor] = []


Kinds = list[tuple[str, int]]
"""Ways to sum, and numbers of elements."""
Results = list[npt.NDArray[np.float32]]


def sums(ranks: PeerSums, rank: int, kinds: Kinds, device: torch.device) -> Results:
    found = []
    for turn, (kind, size) in enumerate(kinds):
        x = part(rank, turn, size).to(device)
        if kind == "norm":
            x = x.view(-1, ROW)
            ranks.add_norm(x, torch.zeros_like(x), RowNorm(torch.ones(ROW, device=device), 1e-6), None)
        else:
            ranks._one_shot_bytes = MAX_BYTES if kind == "one shot" else 0
            ranks.all_reduce(x)
        found.append(x.cpu().numpy())
    return found


def check(results: list[Results], kinds: Kinds) -> None:
    for turn, (kind, size) in enumerate(kinds):
        first, second = (each[turn] for each in results)
        np.testing.assert_array_equal(first, second)
        total = part(0, turn, size) + part(1, turn, size)
        if kind == "norm":
            normed = torch.nn.functional.rms_norm(total.view(-1, ROW), (ROW,), eps=1e-6)
            np.testing.assert_allclose(first, normed.numpy(), rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(first, total.numpy())


def rank_sums(rank: int, place: Rendezvous, kinds: Kinds) -> Results:
    """The sums, then what three replays of a captured sum give."""
    device = torch.device("cuda")
    host = GlooCommunicator(join_store(place), "ranks", Shard(rank, RANKS), place, lambda: None)
    ranks = join_peer_sums(host, device)
    assert ranks is not None, "the log says why"
    found = sums(ranks, rank, kinds, device)
    x, graph = torch.empty(512, device=device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ranks.all_reduce(x)
    for replay in range(3):
        x.fill_(rank + replay)
        graph.replay()
        found.append(x.cpu().numpy())
    host.all_gather(torch.zeros(1))  # nobody's memory goes while another reads it
    return found


def rank_sums_here(rank: int, folder: Path, kinds: Kinds) -> Results:
    from tests.engine.kernels import conftest  # has kernels interpreted, as they are imported

    assert conftest
    return sums(in_one_file(folder, rank), rank, kinds, torch.device("cpu"))


def of_all(work: Callable[..., Results], *args: object) -> list[Results]:
    with ProcessPoolExecutor(RANKS, multiprocessing.get_context("spawn")) as processes:
        calls = [processes.submit(work, rank, *args) for rank in range(RANKS)]
        try:
            return [call.result(timeout=100) for call in calls]
        except BaseException:  # the kernel of one that is left waits for the other without end
            for process in processes._processes.values():
                process.kill()
            raise


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_processes_that_share_a_card() -> None:
    store, kinds = serve_store("127.0.0.1", SECONDS), [*SUMS, *LARGE] * 8
    results = of_all(rank_sums, Rendezvous("127.0.0.1", store.port, "127.0.0.1", SECONDS), kinds)
    check(results, kinds)
    for each in results:
        for replay in range(3):
            np.testing.assert_array_equal(each[len(kinds) + replay], np.full(512, 2.0 * replay + 1, np.float32))


@pytest.mark.whole  # processes wait for each other, and import all kernels
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is CUDA")
def test_processes_that_share_memory(tmp_path: Path) -> None:
    check(of_all(rank_sums_here, tmp_path, SUMS), SUMS)
