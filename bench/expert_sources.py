"""Seconds that a joining rank takes to load a model's experts, by where it gets them from; part of bench/elastic.py.

Each source alone, through what the engine loads with: the files while the page cache has them, the files from the disk, and
another process that holds the experts.
"""

import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from starling_engine.attention.torch_paged import TorchPagedAttention
from starling_engine.expert_parallel.peers import ExpertPeer, ExpertServer
from starling_engine.expert_parallel.ranks import ExpertRanks
from starling_engine.expert_parallel.rearrangement import ExpertLoader
from starling_engine.expert_parallel.sources import CheckpointSource, ExpertSource, PeerSource
from starling_engine.layers.experts import Experts
from starling_engine.layers.linear_select import select_linear_method
from starling_engine.model_config.config import load_model_config
from starling_engine.models.decoder import Decoder
from starling_engine.weights.loader import Checkpoint

ROUNDS = 5
DTYPE, CPU = torch.bfloat16, torch.device("cpu")


def empty(folder: Path) -> Mapping[int, Experts]:
    """A rank's room for all experts."""
    torch.set_num_threads(1)
    config = load_model_config(folder)
    assert config.moe is not None
    ranks = ExpertRanks(config.moe.num_experts, config.moe.num_experts)
    return Decoder(config, DTYPE, CPU, select_linear_method(DTYPE, CPU), TorchPagedAttention(), expert_ranks=ranks).experts


def load(experts: Mapping[int, Experts], source: ExpertSource) -> float:
    """Seconds for all of them."""
    began = time.perf_counter()
    missing = {layer: list(range(each.shape.num_experts)) for layer, each in experts.items()}
    loading = ExpertLoader(experts, missing, source, pause_ratio=0.0)
    while loading.loaded < loading.total and loading.error is None:
        time.sleep(0.001)
    assert loading.error is None, loading.error
    return time.perf_counter() - began


def hold(folder: Path, line: Connection) -> None:
    """A rank that holds all of them, until the line ends."""
    experts = empty(folder)
    load(experts, CheckpointSource(Checkpoint(folder)))
    server = ExpertServer(experts, "127.0.0.1")
    line.send((server.address, server.holds()))
    line.poll(None)


@contextmanager
def holder(folder: Path) -> Iterator[ExpertPeer]:
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=hold, args=(folder, there), daemon=True)
    process.start()
    try:
        yield ExpertPeer(*here.recv())
    finally:
        here.send(None)
        process.join()


def forget(folder: Path) -> None:
    """Takes the files out of the page cache."""
    for path in folder.glob("*.safetensors"):
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def measure(folder: Path) -> list[str]:
    """Lines of a table."""
    size = sum(each.bytes_each * each.shape.num_experts for each in empty(folder).values())
    names = ("files in the page cache", "files not in the page cache", "another rank")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with holder(folder) as peer:
        for _ in range(ROUNDS):
            for name in names:
                if name == "files not in the page cache":
                    forget(folder)
                source = PeerSource(lambda _: [peer]) if name == "another rank" else CheckpointSource(Checkpoint(folder))
                seconds[name].append(load(empty(folder), source))
    lines = ["| experts from | seconds, median | most | MB/s |", "|---|---:|---:|---:|"]
    for name, taken in seconds.items():
        middle = statistics.median(taken)
        lines.append(f"| {name} | {middle:.3f} | {max(taken):.3f} | {size / middle / 1e6:.0f} |")
    return [f"A rank that loads all {size / 1e6:.0f} MB of experts from one source, {ROUNDS} times:", "", *lines]
