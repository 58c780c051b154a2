"""What the filesystem tier makes of a disk: bytes a second against dd's, in turns, and what opening a full folder costs.

`python bench/kv_folder.py [FOLDER]`: some place on the disk in question, which needs 1 GiB free. Writes bench/results/kv_folder.md.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from mmap import mmap
from pathlib import Path

from shared import machine
from starling_engine.kv_offload.secondary.base import ChunkPart, ObjectKey
from starling_engine.kv_offload.secondary.fingerprint import Fingerprint
from starling_engine.kv_offload.secondary.folder.tier import FolderTier, open_folder

RESULTS = Path(__file__).parent / "results" / "kv_folder.md"
MODEL = Fingerprint("bench", "bench", "bfloat16")
PART = ChunkPart(0, 28, 0, 8)
SIZE = 28 * 2 * 8 * 64 * 128 * 2
"""Bytes of 64 tokens of Qwen3-0.6B in bf16: 7 MiB."""
COUNT, ROUNDS, MANY = 25, 11, 100_000


def key(number: int) -> ObjectKey:
    return ObjectKey(sha256(b"%d" % number).digest(), 0, PART)


def memory(number: int) -> memoryview:
    view = memoryview(mmap(-1, SIZE))
    view[:] = os.urandom(1 << 20) * (SIZE >> 20)
    view[:4] = number.to_bytes(4, "little")
    return view


def rate(move: Callable[[], object]) -> float:
    """GB/s of moving all objects."""
    began = time.perf_counter()
    move()
    return COUNT * SIZE / (time.perf_counter() - began) / 1e9


def dd(*arguments: str) -> None:
    subprocess.run(["dd", f"bs={SIZE}", *arguments], check=True, capture_output=True)


def read_all(tier: FolderTier, threads: int) -> None:
    buffers = [memoryview(mmap(-1, SIZE)) for _ in range(threads)]

    def read(thread: int) -> None:
        for number in range(thread, COUNT, threads):
            tier.read(key(number), buffers[thread])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))


def write_all(tier: FolderTier, objects: list[memoryview]) -> None:
    for number, data in enumerate(objects):
        tier.write(key(number), data)


def forget(folder: Path) -> None:
    """Drops the page cache's copies: writes them out, then gives them up."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        fd = os.open(path, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def speeds(root: Path) -> Iterator[str]:
    objects = [memory(number) for number in range(COUNT)]
    source, target = root / "source", root / "target"
    source.write_bytes(b"".join(objects))
    found: dict[str, list[float]] = {}
    for turn in range(ROUNDS):
        direct = open_folder(str(root / f"direct-{turn}"), 1 << 40, "on", MODEL)
        cached = open_folder(str(root / f"direct-{turn}"), 1 << 40, "off", MODEL)
        sides: list[tuple[str, Callable[[], object]]] = [
            ("dd, write", lambda: dd(f"if={source}", f"of={target}", "oflag=direct")),
            ("tier, write", lambda tier=direct: write_all(tier, objects)),
            ("dd, cold read", lambda: dd(f"if={target}", "of=/dev/null", "iflag=direct")),
            ("tier, cold read", lambda tier=direct: read_all(tier, 1)),
            ("tier, cold read, 4 threads", lambda tier=direct: read_all(tier, 4)),
            ("tier, cold read by the page cache", lambda tier=cached: read_all(tier, 1)),
            ("tier, warm read", lambda tier=cached: read_all(tier, 1)),
        ]
        for name, side in sides:
            if "warm" not in name:
                forget(root)
            found.setdefault(name, []).append(rate(side))
        direct.close()
        cached.close()
        subprocess.run(["rm", "-rf", str(root / f"direct-{turn}")], check=True)
        target.unlink()
    source.unlink()
    yield "| | GB/s | from | to |\n|---|---:|---:|---:|"
    for name, rates in found.items():
        yield f"| {name} | {statistics.median(rates):.2f} | {min(rates):.2f} | {max(rates):.2f} |"
    yield ""
    for kind in ("write", "cold read"):
        ratios = [ours / theirs for ours, theirs in zip(found[f"tier, {kind}"], found[f"dd, {kind}"], strict=True)]
        best = max(found[f"tier, {kind}"]) / max(found[f"dd, {kind}"])
        yield f"Tier to dd, {kind}: {statistics.median(ratios):.0%} (median of {ROUNDS} turns; of the best of each: {best:.0%}).\n"


def opening(root: Path) -> Iterator[str]:
    folder = root / "many"
    first = open_folder(str(folder), 1 << 40, "off", MODEL)
    first.write(key(0), memory(0))
    layout = first._layout
    for number in range(1, MANY):
        path = Path(layout.path_of(key(number)))
        path.parent.mkdir(parents=True, exist_ok=True)
        make_sparse(path)
    first.close()
    began, used = time.perf_counter(), time.process_time()
    tier = open_folder(str(folder), 1 << 40, "auto", MODEL)
    opened = time.perf_counter() - began
    tier.read(key(0), memory(0))
    served = time.perf_counter() - began
    while tier.counters.objects < MANY:
        time.sleep(0.01)
    counted, used = time.perf_counter() - began, time.process_time() - used
    tier.close()
    yield (
        f"{MANY:,} objects: open after {1e3 * opened:.1f} ms (target 1 s), the first hit after {1e3 * served:.1f} ms, "
        f"counted after {counted:.1f} s in the background, {used:.2f} s of them at work."
    )


def make_sparse(path: Path) -> None:
    """Counts like an object, and takes no room."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    os.ftruncate(fd, SIZE + 4096)
    os.close(fd)


def main() -> None:
    place = sys.argv[1] if len(sys.argv) > 1 else None
    lines = ["# The folder of the filesystem tier", "", f"{time.strftime('%Y-%m-%d')}. {machine()}.", ""]
    with tempfile.TemporaryDirectory(dir=place, prefix="kv-folder-") as root:
        for part in (speeds, opening):
            for line in part(Path(root)):
                print(line, flush=True)
                lines.append(line)
    RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
