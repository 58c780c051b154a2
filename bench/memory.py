"""How fast this machine reads memory, which bounds decoding: every token reads every weight."""

import time

import torch

FLOATS = 150_000_000
TRIES = 15


def read_bytes_per_second(threads: int) -> float:
    """The best of several sums over 600 MB of fp32, which reads and does next to nothing else."""
    torch.set_num_threads(threads)
    data = torch.ones(FLOATS)
    best = float("inf")
    for _ in range(TRIES):
        began = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - began)
    return data.numel() * data.element_size() / best
