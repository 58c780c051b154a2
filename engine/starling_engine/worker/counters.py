"""Counters of progress in shared memory: each worker counts, its supervisor watches. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True, slots=True)
class ProgressCount:
    """Steps that a rank has finished, ticks within the present one, and ticks in all."""

    steps: int
    ticks: int
    total: int


class ProgressCounters:
    """Holds three numbers a rank, in a file that every process of the node maps, or in this process alone."""

    def __init__(self, path: Path | None, ranks: int) -> None:
        """The first process to open the file makes it."""
        self._values: np.ndarray[tuple[int, int], np.dtype[np.int64]]
        if path is None:
            self._values = np.zeros((ranks, 3), np.int64)
            return
        if not path.exists():
            path.write_bytes(bytes(3 * 8 * ranks))
        self._values = np.memmap(path, np.int64, "r+", shape=(ranks, 3))

    def tick(self, rank: int) -> None:
        self._values[rank, 1:] += 1

    def tick_beside_steps(self, rank: int) -> None:
        """Counts progress beside the steps."""
        self._values[rank, 2] += 1

    def finish_step(self, rank: int) -> None:
        self._values[rank, 1] = 0  # first, so that a rank which is stopped here is not taken for one that is ahead
        self._values[rank] += (1, 0, 1)

    def read(self) -> list[ProgressCount]:
        return [ProgressCount(*row) for row in self._values.tolist()]
