"""`python -m starling_crds`: writes the CustomResourceDefinition into crds/; `--check` only tells whether it is current."""

import argparse
import sys
from pathlib import Path

from starling_crds.manifest import FILE_NAME, crd_yaml


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m starling_crds", description="Write the CRD, generated from the types.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the file is not what the types say")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parents[1], help="crds/ of the checkout by default")
    options = parser.parse_args()
    file = options.folder / FILE_NAME
    if not options.check:
        file.write_text(crd_yaml())
        return 0
    if file.exists() and file.read_text() == crd_yaml():
        return 0
    print(f"{file} is not what the types say; run: python -m starling_crds", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
