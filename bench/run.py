"""The benchmark table: Starling and the peer side by side in one run, on the Qwen3-0.6B shape in bf16.

usage: run.py [--threads N] [--rounds N] [--no-peer] [--only offline|memory|http|prefix]

Engines take turns, so that both meet the same machine; each figure is the best of its rounds.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import checkpoint
import http_streams
import memory_bound
import peer
import prefix_hit
from checkpoint import CACHE
from starling_engine import env, native
from starling_engine.native import isa

BENCH = Path(__file__).parent


def model_asked_for() -> Path:
    """The folder that the command line names; without one, the Qwen3-0.6B shape with random weights."""
    if len(sys.argv) > 1:
        return Path(sys.argv[1])
    model = CACHE / "qwen3-0.6b-shape"
    checkpoint.write(model)
    return model


def offline(interpreter: Path | str, package: str, model: Path, threads: int) -> dict[str, float]:
    command = [str(interpreter), str(BENCH / "offline.py"), package, str(model), str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        sys.exit(f"{package} gave no figures:\n{done.stderr[-3000:]}")
    figures: dict[str, float] = json.loads(lines[-1])
    return figures


def best(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: (min if "(s)" in name else max)(figures[name] for figures in rounds) for name in rounds[0]}


def compare(model: Path, threads: int, rounds: int, with_peer: bool) -> list[str]:
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}, {threads} threads", file=sys.stderr, flush=True)
        ours.append(offline(sys.executable, "starling_engine", model, threads))
        if with_peer:
            theirs.append(offline(peer.python(CACHE), "vllm", model, threads))
    lines = [
        f"### Offline, {threads} thread{'s' if threads > 1 else ''}",
        "",
        "| | Starling | peer | ratio |",
        "|---|---:|---:|---:|",
    ]
    mine, other = best(ours), best(theirs) if theirs else {}
    for name, value in mine.items():
        beside = f"{other[name]:.1f} | {value / other[name]:.2f}" if other else "- | -"
        lines.append(f"| {name} | {value:.1f} | {beside} |")
    return lines


def machine() -> str:
    name = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "?"
    )
    return f"{name}, {os.cpu_count()} cores, {kernels()}; Python {platform.python_version()}"


def kernels() -> str:
    """Returns what computes here: the native kernels' instruction set, and AMX where oneDNN has it."""
    native.load()
    found = native.instruction_set_name()
    has_amx = "amx_bf16" in isa.cpu_flags() and env.cpu_isa() is None
    return f"{found} and AMX" if has_amx else found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--only", choices=("offline", "memory", "http", "prefix"))
    parser.add_argument("--out", type=Path, default=BENCH / "results" / "cpu.md")
    args = parser.parse_args()
    model = CACHE / "qwen3-0.6b-shape"
    checkpoint.write(model)
    lines = ["# CPU", "", f"{time.strftime('%Y-%m-%d')}. {machine()}. Load before: {os.getloadavg()[0]:.1f}.", ""]
    if args.only in (None, "offline"):
        lines += [*compare(model, args.threads, args.rounds, not args.no_peer), ""]
    if args.only in (None, "memory"):
        lines += [*memory_bound.report(model, args.threads), ""]
    if args.only in (None, "http"):
        lines += [*http_streams.report(model, args.threads), ""]
    if args.only in (None, "prefix"):
        lines += [*prefix_hit.report(model, args.threads), ""]
    text = "\n".join(lines)
    print(text)
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(text)


if __name__ == "__main__":
    main()
