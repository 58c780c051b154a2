"""Runs before any test module of the engine is imported."""

import os

# Read when torch loads its OpenMP library. On shared CPUs, threads that spin while they wait for each other make small
# matrix products a hundred times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
