"""The store as a tier, against a real master that is there, away, slow, full, or has damaged values."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from starling_engine.errors import ConfigError
from starling_engine.kv_offload.secondary.base import ChunkPart, ObjectKey, ObjectMissing, TierError
from starling_engine.kv_offload.secondary.store.tier import HEADER, StoreTier, open_store, seal, store_key

from . import store_master
from .store_master import Master

pytestmark = pytest.mark.skipif(store_master.missing() is not None, reason=str(store_master.missing()))

SIZE = 256 << 10
FINGERPRINT = bytes(range(32))
TIMEOUT = 3.0
"""Seconds; on a busy machine a store may answer late, which must not count as an outage."""


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    master = Master(tmp_path_factory.mktemp("store"))
    yield master
    master.kill()


@pytest.fixture(scope="module")
def tier(master: Master) -> Iterator[StoreTier]:
    """A tier that brings memory to the store. Tests use different keys, and wait until it works."""
    tier = open_store(f"{master.url}&segment=64MiB&timeout={TIMEOUT}", FINGERPRINT)
    assert tier.wait(60)
    yield tier
    tier.close()


def key(number: int, group: int = 0) -> ObjectKey:
    return ObjectKey(number.to_bytes(32, "big"), group, ChunkPart(0, 4, 0, 2))


def value(number: int, size: int = SIZE) -> memoryview:
    return memoryview(number.to_bytes(4, "big") * (size // 4))


def read(tier: StoreTier, number: int, size: int = SIZE) -> bytes:
    into = bytearray(size)
    tier.read(key(number), memoryview(into))
    return bytes(into)


def outcome(call: Callable[[], object]) -> tuple[str, float]:
    began = time.monotonic()
    try:
        call()
    except (TierError, ObjectMissing) as error:
        return type(error).__name__, time.monotonic() - began
    return "done", time.monotonic() - began


def until(there: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


def until_written(tier: StoreTier, number: int) -> None:
    until(lambda: outcome(lambda: tier.write(key(number), value(number)))[0] == "done")


def is_left_alone(tier: StoreTier) -> bool:
    """Returns whether a call fails without having waited for the store."""
    try:
        tier.lookup([key(1)])
    except TierError as error:
        return "is left alone" in str(error)
    return False


def outages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "out of order" in r.getMessage()]


def test_many_threads_share_a_small_buffer(master: Master) -> None:
    """The buffer has 16 MiB; 24 threads want 24 MiB and more. The store has room for all 48 MiB."""
    failures: list[str] = []
    with closing(open_store(f"{master.url}&segment=64MiB&timeout=20", FINGERPRINT)) as tier:
        assert tier.wait(60)

        def work(first: int) -> None:
            for number in range(first, first + 2):
                size = 1 << 20
                try:
                    tier.write(key(number), value(number, size))
                    if read(tier, number, size) != bytes(value(number, size)):
                        failures.append(f"{number} differs")
                except (TierError, ObjectMissing) as error:
                    failures.append(repr(error))

        threads = [threading.Thread(target=work, args=(number * 100,)) for number in range(10, 34)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


def test_what_is_written_is_read_by_any_client(master: Master, tier: StoreTier) -> None:
    until_written(tier, 1)
    tier.write(key(1), value(2))  # the first one stays
    other = open_store(master.url, FINGERPRINT)
    foreign = open_store(master.url, b"another model")
    try:
        assert other.wait(60) and foreign.wait(60)
        assert read(other, 1) == bytes(value(1))
        assert other.lookup([key(1), key(2), key(1, group=1)] * 100) == [True, False, False] * 100
        assert foreign.lookup([key(1)]) == [False]
        with pytest.raises(ObjectMissing):
            read(other, 2)
    finally:
        other.close()
        foreign.close()


def test_what_its_helper_takes_is_known(tier: StoreTier) -> None:
    until_written(tier, 1)
    before, began = tier.cpu_elsewhere, time.monotonic()
    for number in range(16):
        tier.write(key(number), value(number, 1 << 20))
    assert 0 < tier.cpu_elsewhere - before < 64 * (time.monotonic() - began)


@pytest.mark.parametrize("damage", ["bit", "short", "long", "foreign"])
def test_damage_is_missing_dropped_and_counted(tier: StoreTier, damage: str) -> None:
    until_written(tier, 70)
    name, before = store_key(FINGERPRINT, key(7)), tier.counters.corrupt
    good = seal(name, value(7)) + bytes(value(7))
    bad = {
        "bit": good[:-1] + bytes([good[-1] ^ 1]),
        "short": good[:-100],
        "long": good + b"x",
        "foreign": seal(store_key(FINGERPRINT, key(8)), value(7)) + bytes(value(7)),
    }[damage]
    client = tier._supervisor.client
    assert client is not None
    deadline = time.monotonic() + 60
    with client.reserve(len(bad), deadline) as stored:
        stored.view[:] = bad
        assert client.call("put", [name], deadline, stored) == [0]
    with pytest.raises(ObjectMissing):
        read(tier, 7)
    assert tier.counters.corrupt == before + 1
    assert tier.lookup([key(7)]) == [False]
    tier.write(key(7), value(7))
    assert read(tier, 7) == bytes(value(7))
    with client.reserve(HEADER.size, deadline):
        assert client.call("drop", [name], deadline) == [0]


def test_a_master_that_dies_under_load_and_comes_back(master: Master, tier: StoreTier, caplog: pytest.LogCaptureFixture) -> None:
    until_written(tier, 4)
    caplog.clear()
    slowest, stop, wrong = [0.0], threading.Event(), []
    refused, errors = tier.counters.refused, tier.counters.errors

    def load(first: int) -> None:
        number = first
        while not stop.is_set():
            number += 1
            for call in (lambda n=number: tier.write(key(n), value(n)), lambda n=number: check(n)):
                slowest[0] = max(slowest[0], outcome(call)[1])
            time.sleep(0.01)

    def check(number: int) -> None:
        if read(tier, number) != bytes(value(number)):
            wrong.append(number)

    threads = [threading.Thread(target=load, args=(100_000 * number,)) for number in range(1, 4)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    master.kill()
    until(lambda: is_left_alone(tier))
    until(lambda: tier.counters.refused > refused + 10)
    master.start()
    until_written(tier, 5)
    stop.set()
    for thread in threads:
        thread.join()
    until_written(tier, 6)
    assert read(tier, 6) == bytes(value(6))
    assert not wrong
    assert slowest[0] < TIMEOUT + 10
    assert len(outages(caplog)) == 1, outages(caplog)
    assert tier.counters.errors < errors + 30


def test_a_master_that_hangs_costs_one_time_limit(master: Master, tier: StoreTier, caplog: pytest.LogCaptureFixture) -> None:
    until_written(tier, 21)
    caplog.clear()
    with master.stopped():
        assert outcome(lambda: read(tier, 21))[0] == "TierError"
        assert all(is_left_alone(tier) for _ in range(50))
        client = tier._supervisor._helper
        assert client is not None and client._space.used, "what a late call may write to is not used again"
        time.sleep(0.7)
    until_written(tier, 22)
    assert read(tier, 21) == bytes(value(21))
    assert client is tier._supervisor._helper and not client._space.used
    assert len(outages(caplog)) == 1


def test_nobody_waits_for_what_another_one_knows(master: Master, tier: StoreTier) -> None:
    """Calls that began later end with the first that is late, before their own time limits."""
    until_written(tier, 31)
    ends: list[float] = []

    def late(delay: float) -> None:
        time.sleep(delay)
        if outcome(lambda: read(tier, 31))[0] == "TierError":
            ends.append(time.monotonic())

    with master.stopped():
        threads = [threading.Thread(target=late, args=(delay,)) for delay in (0.0, 0.8 * TIMEOUT)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    until_written(tier, 32)
    assert len(ends) == 2
    assert max(ends) - min(ends) < 0.6 * TIMEOUT


def test_a_library_that_crashes_takes_nothing_along(tier: StoreTier, caplog: pytest.LogCaptureFixture) -> None:
    until_written(tier, 41)
    caplog.clear()
    client = tier._supervisor.client
    assert client is not None
    os.kill(client._process.pid, signal.SIGSEGV)
    until(lambda: client.failure is not None)
    until_written(tier, 2)
    assert read(tier, 2) == bytes(value(2))
    assert "ended with -11" in outages(caplog)[0] and len(outages(caplog)) == 1


def test_a_full_store_is_read_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    master, size, kept = Master(tmp_path), 4 << 20, []
    tier = open_store(f"{master.url}&segment=32MiB", FINGERPRINT)
    try:
        assert tier.wait(60)
        for number in range(20):
            if outcome(lambda number=number: tier.write(key(number), value(number, size)))[0] == "done":
                kept.append(number)
        assert tier.counters.full >= 2 and not tier.counters.refused, "it is not out of order"
        assert 4 <= len(kept) < 20
        newest = max(number for number in kept if tier.lookup([key(number)]) == [True])
        assert read(tier, newest, size) == bytes(value(newest, size))
        assert not outages(caplog)
        assert sum("no room" in record.getMessage() for record in caplog.records) == 1
    finally:
        tier.close()
        master.kill()


def test_a_store_that_comes_later_is_joined(tmp_path: Path) -> None:
    master = Master(tmp_path)
    master.kill()
    began = time.monotonic()
    tier = open_store(f"{master.url}&segment=16MiB", FINGERPRINT)
    try:
        assert time.monotonic() - began < 25, "start-up does not wait for it"
        assert is_left_alone(tier)
        master.start()
        assert tier.wait(60)
        until_written(tier, 1)
        assert read(tier, 1) == bytes(value(1))
    finally:
        tier.close()
        master.kill()


def test_closing_does_not_wait_for_a_store_that_is_not_there() -> None:
    tier = open_store("mooncake://127.0.0.1:1", FINGERPRINT)
    until(lambda: tier._supervisor._helper is not None)
    began = time.monotonic()
    tier.close()
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://host:1", "redis"),
        ("mooncake://host", "mooncake://host"),
        ("mooncake://:50051", "mooncake://:50051"),
        ("mooncake://host:x", "host:x"),
        ("mooncake://host:1/path", "path"),
        ("mooncake://[::1", "IPv6"),
        ("mooncake://host:1?segment=4GX", "like 4GiB"),
        ("mooncake://host:1?buffer=1KiB", "at least 1MiB"),
        ("mooncake://host:1?timeout=0", "timeout"),
        ("mooncake://host:1?metadata=etcd://x", "metadata"),
        ("mooncake://host:1?colour=red", "colour"),
    ],
)
def test_a_wrong_url_is_refused(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match="mooncake://MASTER:PORT") as caught:
        open_store(url, FINGERPRINT)
    assert caught.value.field == "kv_store" and says in str(caught.value)


def test_a_library_that_cannot_be_loaded_is_an_error_that_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "store.py").write_text("raise ImportError('libibverbs.so.1: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(ConfigError, match=r"libibverbs.so.1: .*starling\[store\].*librdmacm1") as caught:
        open_store("mooncake://127.0.0.1:1", FINGERPRINT)
    assert caught.value.field == "kv_store"


def test_a_helper_ends_with_its_engine(master: Master) -> None:
    opens = f"""
import sys
from starling_engine.kv_offload.secondary.store.tier import open_store
tier = open_store({master.url!r}, b"")
assert tier.wait(60)
print(tier._supervisor.client._process.pid, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", opens], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        helper = int(engine.stdout.readline())
        assert Path(f"/proc/{helper}").exists()
        engine.kill()
    until(lambda: not Path(f"/proc/{helper}").exists())
