"""`python -m starling_engine.native`: builds the CPU kernels now, so that the first server does not wait for the compiler.

With a folder, it builds for any CPU that can run them. An image does so, and names the folder in STARLING_KERNELS.
"""

import logging
import sys
from pathlib import Path

from starling_engine.native import load
from starling_engine.native.build import Unavailable, build_ahead

logging.basicConfig(format="%(message)s")
if len(sys.argv) > 1:
    try:
        print(f"native CPU kernels: {build_ahead(Path(sys.argv[1]))}")
    except Unavailable as error:
        sys.exit(f"native CPU kernels are not built: {error}")
elif load() is not None:
    print("native CPU kernels: ready")
