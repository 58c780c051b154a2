"""`python -m starling_crds`: writes the CustomResourceDefinitions into crds/; `--check` only reports whether they are current."""

import argparse
import sys
from pathlib import Path

from starling_crds.manifest import crd_yaml, crds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m starling_crds", description="Write the CRDs, generated from the types.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file is not what the types say")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parents[1], help="crds/ of the checkout by default")
    options = parser.parse_args()
    wanted = {options.folder / name: crd_yaml(crd) for name, crd in crds().items()}
    stale = [file for file, text in wanted.items() if not file.exists() or file.read_text() != text]
    if not options.check:
        for file in stale:
            file.write_text(wanted[file])
        return 0
    for file in stale:
        print(f"{file} is not what the types say; run: python -m starling_crds", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
