"""Keeps what a run leaves behind, as it comes and whatever happens to the run: rows, log, kernels, profile, JUnit.

The folder is the one that OUT names, from which a borrowed machine's files come back, or .cache/gpu-out. It holds few files, and no
folders.
"""

import json
import os
import tarfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from bench.gpu.table import Row

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / ".cache/gpu-kernels"
"""Triton's cache of compiled kernels."""


def folder() -> Path:
    out = Path(os.environ.get("OUT") or ROOT / ".cache/gpu-out")
    out.mkdir(parents=True, exist_ok=True)
    return out


def log_file() -> Path:
    """The file has what all sections write to their error streams."""
    return folder() / "log.txt"


def failures_file() -> Path:
    """Tracebacks; the row of each says "failed"."""
    return folder() / "failures.txt"


def junit_file() -> Path:
    return folder() / "junit.xml"


def profile_file() -> Path:
    """A line for each kernel of a profile."""
    return folder() / "profile.csv"


class Rows:
    """The rows of all sections, a line of JSON each."""

    def __init__(self) -> None:
        self.path = folder() / "rows.jsonl"

    def add(self, section: str, row: Row) -> None:
        self._write({"section": section, "row": asdict(row)})

    def add_machine(self, section: str, machine: str) -> None:
        """Returns where the section runs: its first line."""
        self._write({"section": section, "machine": machine})

    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def since(self, at: int) -> tuple[str | None, list[Row]]:
        """The machine, and the rows, that were written from byte `at` on."""
        lines = self.path.read_bytes()[at:].splitlines() if self.path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith(b"}")]
        machine = next((each["machine"] for each in found if "machine" in each), None)
        return machine, [Row(**each["row"]) for each in found if "row" in each]

    def _write(self, line: dict[str, object]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def keep_failure(what: str, said: str) -> None:
    with failures_file().open("a") as file:
        file.write(f"==== {what}\n{said.strip()}\n\n")


def pack_kernels() -> None:
    """Leaves the compiled kernels as one file, for a later run on another machine."""
    if not KERNELS.is_dir():
        return
    unfinished = folder() / ".kernels"
    with tarfile.open(unfinished, "w:xz", preset=1) as packed:
        for path in _files():
            packed.add(path, str(path.relative_to(KERNELS)), recursive=False)
    unfinished.rename(folder() / "kernels.tar.xz")


def unpack_kernels(packed: Path) -> None:
    """Takes the kernels that another run left."""
    KERNELS.mkdir(parents=True, exist_ok=True)
    with tarfile.open(packed) as archive:
        archive.extractall(KERNELS, filter="data")


def _files() -> Iterator[Path]:
    """Returns the files that Triton reads again. Others may come and go while they are listed."""
    for path in sorted(KERNELS.rglob("*")):
        if path.is_file() and ".tmp." not in path.name:
            yield path
