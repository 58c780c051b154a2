"""What it costs a layer that its experts are on two ranks, by the way in which tokens meet them.

    python bench/expert_exchange.py

Two processes of one thread each, every one with tokens of its own, beside one process with one thread, all experts, and the tokens
of one rank. Qwen3-30B-A3B's sizes with 32 experts, in bf16, and a shared expert of 1,536, computed while tokens are on their way
or before they leave. Writes bench/results/expert_exchange.md.
"""

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from shared import machine
from starling_engine.expert_parallel.ranks import ExchangeName, ExpertRanks
from starling_engine.layers.experts import ExpertNames, Experts, ExpertsShape
from starling_engine.layers.experts_packed import NativeExperts
from starling_engine.layers.router import route
from starling_engine.model_config.moe import Routing
from starling_engine.native import ops
from starling_engine.parallel.communicator import ALONE, Communicator, no_tick
from starling_engine.parallel.gloo import GlooCommunicator, join_store, serve_store
from starling_engine.parallel.shared_memory import SharedMemoryCommunicator
from starling_engine.topology.placement import spread
from starling_engine.topology.rendezvous import Rendezvous
from starling_engine.topology.shard import Shard, Share

RESULTS = Path(__file__).parent / "results" / "expert_exchange.md"
EXPERTS, HIDDEN, SIZE, SHARED, TOP_K = 32, 2048, 768, 1536, 8
ROUTING = Routing(num_experts=EXPERTS, top_k=TOP_K, renormalize=True)
TOKENS = (1, 16, 256)
SECONDS, TURNS = 0.2, 3
WAYS: list[tuple[str, ExchangeName]] = [
    (kind, exchange) for kind in ("shared", "gloo") for exchange in ("all_to_all", "all_gather")
]


def experts(held: range) -> Experts:
    shape = ExpertsShape(EXPERTS, EXPERTS, HIDDEN, Share.all(SIZE))
    layer = Experts(ExpertNames("", ("gate", "up", "down"), ((), ())), shape, NativeExperts(), torch.bfloat16, torch.device("cpu"))
    pool = torch.randn(SIZE, HIDDEN).mul_(HIDDEN**-0.5).to(torch.bfloat16)
    for expert in held:
        for slot in layer.reserve(expert).values():
            slot.load(pool.view(slot.shape))
    return layer


def shared_expert() -> Callable[[torch.Tensor], torch.Tensor]:
    gate_up = ops.pack_linear(torch.randn(2 * SHARED, HIDDEN).mul_(HIDDEN**-0.5).bfloat16(), gated=True)
    down = ops.pack_linear(torch.randn(HIDDEN, SHARED).mul_(SHARED**-0.5).bfloat16())
    return lambda x: ops.linear(ops.linear(x, gate_up), down)


def quick_ms(ranks: ExpertRanks, layer: Experts, tokens: int, *, overlap: bool) -> float:
    """Of one layer, the time that the fastest tenth of calls keep. All ranks make as many calls, which the first one says."""
    torch.manual_seed(ranks.rank)
    shared, x = shared_expert(), torch.randn(tokens, HIDDEN).bfloat16()
    weights, ids = route(torch.randn(tokens, EXPERTS), ROUTING)

    def call() -> float:
        began = time.perf_counter()
        before = None if overlap else shared(x)
        combine = ranks.dispatch(0, x, ids, weights)
        between = shared(x) if overlap else before
        combine(layer.forward).add_(between)
        return time.perf_counter() - began

    once = min(call() for _ in range(5))
    calls = int(ranks.communicator.all_gather(torch.tensor([SECONDS / once]))[0])
    times = sorted(call() for _ in range(max(20, calls)))
    return times[len(times) // 10] * 1e3


def measure(connection: Any, index: int, port: int) -> None:
    torch.set_num_threads(1)
    place = Rendezvous("127.0.0.1", port, "127.0.0.1", 60.0)
    slow = GlooCommunicator(join_store(place), "all", Shard(index, 2), place, no_tick)
    communicators: dict[str, Communicator] = {"gloo": slow, "shared": SharedMemoryCommunicator(slow, 60.0)}
    layer = experts(range(16 * index, 16 * index + 16))
    for tokens in TOKENS:
        found: dict[tuple[str, str, bool], list[float]] = {}
        for _ in range(TURNS):
            for kind, exchange in WAYS:
                for overlap in (False, True):
                    ranks = ExpertRanks(EXPERTS, EXPERTS, exchange=exchange)
                    ranks.set_placement(communicators[kind], spread(EXPERTS, 2, 1))
                    found.setdefault((kind, exchange, overlap), []).append(quick_ms(ranks, layer, tokens, overlap=overlap))
        connection.send({way: min(times) for way, times in found.items()})


def main() -> None:
    torch.set_num_threads(1)
    store = serve_store("127.0.0.1", 60.0)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    processes = [context.Process(target=measure, args=(pipes[i][1], i, store.port)) for i in range(2)]
    for process in processes:
        process.start()
    found = [pipes[0][0].recv() for _ in TOKENS]
    for process in processes:
        process.join()
    alone = ExpertRanks(EXPERTS, EXPERTS)
    alone.set_placement(ALONE, spread(EXPERTS, 1, 1))
    layer = experts(range(EXPERTS))
    lines = [
        "# Experts on two ranks",
        "",
        f"{time.strftime('%Y-%m-%d')}. {machine()}. Milliseconds of a layer, of the fastest tenth of calls;",
        "the shared expert before the tokens leave / while they are on their way.",
        "",
        "| tokens of each rank | all experts on one | " + " | ".join(f"{kind}, {exchange}" for kind, exchange in WAYS) + " |",
        "|---:|---:|" + "---:|" * len(WAYS),
    ]
    for tokens, times in zip(TOKENS, found, strict=True):
        one = min(quick_ms(alone, layer, tokens, overlap=False) for _ in range(TURNS))
        cells = [f"{times[(*way, False)]:.2f} / {times[(*way, True)]:.2f}" for way in WAYS]
        lines.append(f"| {tokens} | {one:.2f} | " + " | ".join(cells) + " |")
    RESULTS.write_text("\n".join([*lines, ""]))
    print(RESULTS.read_text())


if __name__ == "__main__":
    main()
