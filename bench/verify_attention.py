"""Times a layer's attention where each decode brings drafts, against that of single tokens, on the heads of Qwen3-0.6B.

    python bench/verify_attention.py [--before LIBRARY] [--batch 1,8,32] [--context 128,1024,4096] [--rounds 15]

Rows of 1 to 8 tokens take turns, and so do the kernels and those of LIBRARY, which `python -m starling_engine.native FOLDER` built
in another checkout. Each number is the median over all rounds. Layers take turns too, so that keys and values come from memory.
"""

import argparse
import ctypes
import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch
from native_kernels import DIM, HEADS, KV_HEADS, paged
from shared import machine
from starling_engine.native import bindings, ops

LAYERS_BYTES = 256 * 2**20
"""Keys and values of all layers: far more than the caches of a CPU hold."""
TURN_SECONDS = 0.02
SLEEP_SECONDS = 0.004
"""The threads of the library that had its turn before sleep after so long, and need no core any more."""


@contextmanager
def kernels_of(library: Path | None) -> Iterator[None]:
    """Lets `ops` call another library; None is this checkout's own."""
    with mock.patch.object(bindings, "load", lambda: ctypes.CDLL(str(library))) if library else nullcontext():
        bindings.loaded.cache_clear()
        yield


class Layers:
    """The caches of a model's layers, for `batch` decodes of the same context."""

    def __init__(self, batch: int, context: int, tokens: list[int]) -> None:
        _, kv, *self.indices = paged(batch, 1, context, HEADS, KV_HEADS, DIM)
        self.caches = itertools.cycle([kv.clone() for _ in range(-(-LAYERS_BYTES // kv.nbytes))])
        self.queries = {n: torch.randn(batch * n, HEADS, DIM).bfloat16() for n in tokens}
        self.starts = {n: (torch.arange(batch + 1) * n).int() for n in tokens}

    def attend(self, tokens: int) -> None:
        tables, _, contexts = self.indices
        ops.paged_attention(self.queries[tokens], next(self.caches), tables, self.starts[tokens], contexts, DIM**-0.5)

    def turn(self, tokens: int) -> list[float]:
        """Returns the seconds of each call of a turn. The first wakes the threads, and does not count."""
        time.sleep(SLEEP_SECONDS)
        self.attend(tokens)
        seconds, end = [], time.perf_counter() + TURN_SECONDS
        while (start := time.perf_counter()) < end or not seconds:
            self.attend(tokens)
            seconds.append(time.perf_counter() - start)
        return seconds


Rounds = dict[tuple[str, int], list[float]]
"""Returns the median seconds of each round, by library and number of tokens."""


def compare(layers: Layers, tokens: list[int], libraries: dict[str, Path | None], rounds: int) -> Rounds:
    medians: Rounds = {(name, n): [] for name in libraries for n in tokens}
    for _, n, (name, library) in itertools.product(range(rounds), tokens, libraries.items()):
        with kernels_of(library):
            medians[name, n].append(statistics.median(layers.turn(n)))
    return medians


def ratio(mine: list[float], other: list[float]) -> str:
    """The median of the rounds' ratios, and the quartiles."""
    low, median, high = statistics.quantiles((a / b for a, b in zip(mine, other, strict=True)), n=4)
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def table(title: str, found: Rounds, tokens: list[int], libraries: list[str]) -> Iterator[str]:
    for n in tokens:
        cells = [title, str(n)]
        for name in libraries:
            cells += [f"{statistics.median(found[name, n]) * 1e3:.3f}", ratio(found[name, n], found[name, tokens[0]])]
        if len(libraries) > 1:
            cells.append(ratio(found["now", n], found["before", n]))
        yield f"| {' | '.join(cells)} |"


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a library of other kernels, to compare with")
    parser.add_argument("--tokens", type=integers, default=[1, 2, 3, 4, 5, 6, 8])
    parser.add_argument("--batch", type=integers, default=[1, 8, 32])
    parser.add_argument("--context", type=integers, default=[128, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    libraries = {"before": args.before, "now": None} if args.before else {"now": None}
    print(f"{machine()}. {torch.get_num_threads()} threads.\n")
    heads = [cell for name in libraries for cell in (f"{name} (ms)", f"of {args.tokens[0]}")] + ["now / before"] * bool(args.before)
    print(f"| rows x context | tokens | {' | '.join(heads)} |\n|---|---:|{'---:|' * len(heads)}")
    for batch, context in itertools.product(args.batch, args.context):
        tokens = [n for n in args.tokens if n <= context]
        found = compare(Layers(batch, context, tokens), tokens, libraries, args.rounds)
        for line in table(f"{batch} x {context}", found, tokens, list(libraries)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
