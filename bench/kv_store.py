"""What the store's tier moves, against its library called directly: bytes/s of 1 MiB values over loopback.

`python bench/kv_store.py [VALUES]` writes bench/results/kv_store.md.
"""

import ctypes
import importlib.util
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from shared import machine
from starling_engine.kv_offload.secondary.base import ChunkPart, ObjectKey
from starling_engine.kv_offload.secondary.store.tier import StoreTier, open_store

RESULTS = Path(__file__).parent / "results" / "kv_store.md"
SIZE = 1 << 20
PORT = 51950


@contextmanager
def master(folder: Path, segment: str = "2GiB") -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The URL of a store, to which a tier of its own process has given memory, and its master."""
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None and spec.origin is not None, "pip install 'starling[store]'"
    options = [f"--rpc_port={PORT}", "--enable_http_metadata_server=true", f"--http_metadata_server_port={PORT + 1}"]
    with (folder / "master.log").open("wb") as log:
        program = [Path(spec.origin).with_name("mooncake_master"), *options, f"--metrics_port={PORT + 2}"]
        process = subprocess.Popen(program, stdout=log, stderr=log)
    url = f"mooncake://127.0.0.1:{PORT}?metadata=http://127.0.0.1:{PORT + 1}/metadata"
    holder = open_store(f"{url}&segment={segment}", b"")
    try:
        assert holder.wait(30)
        yield url, process
    finally:
        holder.close()
        process.kill()
        process.wait()


def key(run: str, number: int) -> ObjectKey:
    return ObjectKey(f"{run}{number}".encode(), 0, ChunkPart(0, 1, 0, 1))


def through_tier(tier: StoreTier, run: str, threads: int, count: int) -> tuple[float, float]:
    """Bytes/s of writes and of reads, with so many threads calling."""
    data = memoryview(os.urandom(SIZE))
    into = [memoryview(bytearray(SIZE)) for _ in range(count)]
    with ThreadPoolExecutor(threads) as pool:
        put = rate(count, lambda: list(pool.map(lambda n: tier.write(key(run, n), data), range(count))))
        get = rate(count, lambda: list(pool.map(lambda n: tier.read(key(run, n), into[n]), range(count))))
    assert all(value == data for value in into)
    return put, get


def directly(url: str, count: int, batch: int) -> tuple[float, float]:
    """The same with the library in this process, one thread, `batch` values in a call."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    metadata = url.partition("metadata=")[2]
    assert store.setup("127.0.0.1", metadata, 0, 16 << 20, "tcp", "", f"127.0.0.1:{PORT}") == 0
    memory = mmap.mmap(-1, count * SIZE)
    held = ctypes.c_char.from_buffer(memory)
    base = ctypes.addressof(held)
    assert store.register_buffer(base, count * SIZE) == 0
    memory[:] = os.urandom(SIZE) * count
    calls = [range(at, min(at + batch, count)) for at in range(0, count, batch)]

    def run(function: Callable[[list[str], list[int], list[int]], list[int]]) -> None:
        for numbers in calls:
            names = [f"bare{batch}.{n}" for n in numbers]
            assert min(function(names, [base + n * SIZE for n in numbers], [SIZE] * len(numbers))) >= 0

    rates = rate(count, lambda: run(store.batch_put_from)), rate(count, lambda: run(store.batch_get_into))
    store.close()
    return rates


def rate(count: int, run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return count * SIZE / (time.perf_counter() - began)


def measured(url: str, count: int) -> Iterator[str]:
    tier = open_store(url, b"")
    assert tier.wait(30)
    for threads in (1, 4, 16):
        yield row(f"tier, {threads} threads", through_tier(tier, f"t{threads}.", threads, count))
    tier.close()
    for batch in (1, 32):
        yield row(f"library, {batch} in a call", directly(url, count, batch))


def row(label: str, rates: tuple[float, float]) -> str:
    return f"| {label} | {rates[0] / 1e9:.2f} | {rates[1] / 1e9:.2f} |"


def main() -> None:
    count = int(next(iter(sys.argv[1:]), 128))
    lines = ["# The store over loopback", "", f"{time.strftime('%Y-%m-%d')}. {machine()}. {count} values of 1 MiB.", ""]
    lines += ["| | put (GB/s) | get (GB/s) |", "|---|---:|---:|"]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as folder, master(Path(folder)) as (url, _):
        for line in measured(url, count):
            print(line, flush=True)
            lines.append(line)
    RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
