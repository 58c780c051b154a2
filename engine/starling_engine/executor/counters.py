"""Counters of progress in shared memory: each worker counts, its supervisor watches. Imports no torch."""

from pathlib import Path

import numpy as np


class Counters:
    """One number a rank, in a file that every process of the node maps."""

    def __init__(self, path: Path, ranks: int) -> None:
        """The first process to open the file makes it."""
        if not path.exists():
            path.write_bytes(bytes(8 * ranks))
        self._values = np.memmap(path, np.int64, "r+", shape=(ranks,))

    def add(self, rank: int) -> None:
        self._values[rank] += 1

    def read(self) -> list[int]:
        counts: list[int] = self._values.tolist()
        return counts
