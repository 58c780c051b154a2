"""`python -m starling_engine.native`: builds the CPU kernels now, so that the first server does not wait for the compiler.

With a folder, it builds them ahead, for machines that name the folder in STARLING_KERNELS.
"""

import argparse
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from starling_engine.errors import ConfigError
from starling_engine.native import load
from starling_engine.native.build import build_ahead, instruction_set
from starling_engine.native.isa import InstructionSet, Unavailable, of_this_architecture


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m starling_engine.native", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="build ahead, into this folder")
    parser.add_argument("--this-cpu", action="store_true", help="only for this CPU's set, not for all of its architecture")
    args = parser.parse_args()
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    try:
        if args.folder is None:
            load()
            return
        _build_all(args.folder, [instruction_set()] if args.this_cpu else of_this_architecture())
    except (Unavailable, ConfigError) as error:
        sys.exit(f"native CPU kernels are not built: {error}")


def _build_all(folder: Path, wanted: list[InstructionSet]) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        for built in compilers.map(lambda found: build_ahead(folder, found), wanted):
            print(f"native CPU kernels: {built}")


if __name__ == "__main__":
    main()
