"""Measures `starling router`: what it saves where chats share prefixes, what it costs, and how fair it is to tenants.

    python bench/router.py [prefixes] [texts] [overhead] [fairness] [--rounds N] [--seconds S] [--short] [--goals]

prefixes   tokens found in caches, first tokens and balance on four servers: beside round robin, sglang-router, vllm-router, and one
           server with all of the KV memory
texts      the same while servers tell nothing of their caches, so that our router goes by texts alone
overhead   what it adds to first tokens while 200 streams are open, and what requests take of its processor, by texts and by blocks;
           and a pick among 1,000
fairness   first tokens of a tenant beside one that floods, and the tokens of equal tenants

Each section is written to bench/results/router.md on its own; others stay as they are there. `--short` and `--goals` only print.
"""

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

import router_fairness
import router_overhead
import router_prefixes
import small_model
from checkpoint import CACHE
from sections import write_section
from shared import machine

RESULTS = Path(__file__).parent / "results" / "router.md"
TITLES = {
    "prefixes": "Chats that share prefixes",
    "texts": "The same by texts alone",
    "overhead": "What the router costs",
    "fairness": "Tenants",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(TITLES)}; default: all")
    parser.add_argument("--rounds", type=int, default=3, help="of each side, in turns")
    parser.add_argument("--seconds", type=float, help="of each part of `overhead`, which takes nine of them and a minute a round")
    parser.add_argument("--short", action="store_true", help="one round of little, and no file: only to see that it works")
    parser.add_argument("--goals", action="store_true", help="no file; ends with 1 where `prefixes` or `texts` miss a goal")
    args = parser.parse_args()
    if unknown := set(args.sections) - TITLES.keys():
        parser.error(f"there is no section {', '.join(unknown)}; there are {', '.join(TITLES)}")
    if args.short:
        args.rounds = 1
    for name in args.sections or TITLES:
        head = f"{time.strftime('%Y-%m-%d')}. {machine()}. Load before: {os.getloadavg()[0]:.1f}."
        text = ""
        try:
            for text in measured(name, args):
                if not (args.short or args.goals):
                    write_section(RESULTS, "The router", TITLES[name], f"{head}\n\n{text}")
        finally:
            print(f"## {TITLES[name]}\n\n{head}\n\n{text}\n", flush=True)


def measured(name: str, args: argparse.Namespace) -> Iterator[str]:
    """Yields a section's text after each round, so that what was measured is not lost with the rest."""
    if name == "overhead":
        yield from router_overhead.measure(args.rounds, args.seconds, args.short)
        return
    model = small_model.gguf(CACHE)
    if name == "fairness":
        yield from router_fairness.measure(model, args.rounds, args.short)
    else:
        yield from router_prefixes.measure(model, args.rounds, name == "prefixes", args.short, args.goals)


if __name__ == "__main__":
    main()
