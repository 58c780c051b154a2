"""Times a layer's experts on the native grouped kernels, also in 8 and 4 bits, against the torch fallback: Qwen3-30B-A3B's shape.

    python bench/moe.py [--experts 64] [--seconds 0.5] [--threads 2]

Fewer experts than the model's 128, so that all forms of them fit in 4 GB; a token still goes to 8. The sides run in turns, and
each number is the best of many runs. GB/s counts the weights of the experts in use, read once; GFLOP/s counts multiplications and
additions. Every run has its own routes, drawn evenly, so that no cache holds the weights of the next.
"""

import argparse
import itertools

import torch
from native_kernels import Clock, memory_bandwidth
from shared import machine
from starling_engine.layers.experts import ExpertNames, Experts, ExpertsMethod, ExpertsShape
from starling_engine.layers.experts_dense import DenseExperts
from starling_engine.layers.experts_packed import NativeExperts
from starling_engine.layers.experts_quantized import QuantizedExperts
from starling_engine.layers.linear_quantized import ONLINE
from starling_engine.layers.router import route
from starling_engine.model_config.moe import Routing
from starling_engine.native import routing_ops
from starling_engine.topology.shard import Share
from torch import Tensor

HIDDEN, SIZE, TOP_K = 2048, 768, 8
BF16 = torch.bfloat16
DRAWS = 8
Routes = tuple[Tensor, Tensor]


def build(method: ExpertsMethod, shape: ExpertsShape) -> Experts:
    layer = Experts(ExpertNames("", ("gate", "up", "down"), ((), ())), shape, method, BF16, torch.device("cpu"))
    pool = torch.randn(SIZE, HIDDEN).mul_(HIDDEN**-0.5).to(BF16)
    for slot in [slot for expert in range(shape.num_experts) for slot in layer.reserve(expert).values()]:
        slot.load(pool.view(slot.shape))
    return layer


def draw(tokens: int, routing: Routing) -> list[Routes]:
    routes = [route(torch.randn(tokens, routing.num_experts), routing) for _ in range(DRAWS)]
    return [(ids, weights) for weights, ids in routes]


def time_layer(clock: Clock, layer: Experts, x: Tensor, routes: list[Routes]) -> float:
    turns = itertools.cycle(routes)
    return clock(lambda: layer.forward(x, *next(turns)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.5, help="least time to spend on each number")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = Clock(arguments.seconds)
    shape = ExpertsShape(arguments.experts, arguments.experts, HIDDEN, Share.all(SIZE))
    routing = Routing(num_experts=arguments.experts, top_k=TOP_K, renormalize=True)
    native, dense = build(NativeExperts(), shape), build(DenseExperts(), shape)
    quantized = {name: build(QuantizedExperts(form, form, online=True), shape) for name, form in ONLINE.items()}
    print(f"{machine()}. {arguments.threads} threads.")
    print(memory_bandwidth(clock))
    for tokens in (1, 2, 8, 32, 128, 512, 2048):
        x, routes = torch.randn(tokens, HIDDEN).to(BF16), draw(tokens, routing)
        used = sum(len(ids.unique()) for ids, _ in routes) / DRAWS
        ours, theirs = time_layer(clock, native, x, routes), time_layer(clock, dense, x, routes)
        faster = {name: ours / time_layer(clock, layer, x, routes) for name, layer in quantized.items()}
        work = 3 * HIDDEN * SIZE * 2
        print(
            f"{tokens} tokens, {used:.0f} experts: native {ours * 1e3:.2f} ms, {used * work / ours / 1e9:.1f} GB/s, "
            f"{tokens * TOP_K * work / ours / 1e9:.0f} GFLOP/s | torch {theirs * 1e3:.2f} ms, {theirs / ours:.1f} times as long | "
            + ", ".join(f"{name} {ratio:.2f} times as fast" for name, ratio in faster.items()),
            flush=True,
        )
    ids, _ = draw(1, routing)[0]
    weights = torch.rand(ids.shape)
    chosen = clock(routing_ops.route, torch.randn(1, arguments.experts), routing)
    sorted_ = clock(routing_ops.group_by_slot, ids, weights, shape.num_slots)
    print(f"of one token: route {chosen * 1e6:.0f} us, sort {sorted_ * 1e6:.0f} us")


if __name__ == "__main__":
    main()
