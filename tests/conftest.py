"""Runs before any test module of the engine is imported."""

import gc
import os

# Read when torch loads its OpenMP library. On shared CPUs, threads that spin while they wait for each other make small
# matrix products a hundred times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# What is imported and collected stays to the end: to look through it again and again takes a sixth of the time.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
