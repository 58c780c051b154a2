"""`python -m starling_engine.native`: builds the CPU kernels now, so that the first server does not wait for the compiler."""

import logging

from starling_engine.native import load

logging.basicConfig(format="%(message)s")
if load() is not None:
    print("native CPU kernels: ready")
