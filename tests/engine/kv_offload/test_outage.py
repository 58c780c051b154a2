"""A folder that is out of order costs nothing and is logged once; it comes back by itself."""

import errno
import logging
import math
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from starling_engine.kv_offload.secondary.base import ObjectMissing, TierError
from starling_engine.kv_offload.secondary.circuit_breaker import CircuitBreaker
from starling_engine.kv_offload.secondary.folder.tier import FolderBreakers, FolderTier, open_folder

from tests.engine.kv_offload.objects import FILE, MODEL, content, file_of, key, quiet_tier, read, run_janitor, write


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0


def breaker_of(clock: Clock) -> CircuitBreaker:
    return FolderBreakers("/cache", clock).folder


def fail(breaker: CircuitBreaker, number: int = errno.EIO) -> None:
    with pytest.raises(TierError), breaker.attempt(1.0):
        raise OSError(number, os.strerror(number))


def works(breaker: CircuitBreaker) -> bool:
    """Returns whether an operation is let through, which then works."""
    try:
        with breaker.attempt(1.0):
            return True
    except TierError:
        return False


def test_one_is_let_through_after_a_pause_that_doubles(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    breaker = breaker_of(clock)
    fail(breaker)
    pause = FIRST_PAUSE
    for _ in range(10):
        clock.now += 0.9 * pause
        assert not works(breaker)
        clock.now += 0.2 * pause
        fail(breaker)
        pause = min(2 * pause, LONGEST_PAUSE)
    clock.now += LONGEST_PAUSE
    assert works(breaker) and works(breaker)
    assert (breaker.failed, breaker.refused) == (11, 10)
    assert len(caplog.records) == 2
    assert "Input/output error" in caplog.text and "works again" in caplog.text


def test_only_one_tries_at_a_time() -> None:
    clock = Clock()
    breaker = breaker_of(clock)
    fail(breaker)
    clock.now += 2
    with breaker.attempt(1.0):
        assert not works(breaker)
    assert works(breaker)


def test_what_was_under_way_when_it_opened_neither_closes_it_nor_prolongs_it() -> None:
    clock = Clock()
    breaker = breaker_of(clock)
    with breaker.attempt(9.0):
        fail(breaker)
    assert breaker.is_open
    with pytest.raises(TierError), breaker.attempt(9.0):
        clock.now += 2
        raise TierError("of another kind")
    assert breaker.is_open
    clock.now += 2
    assert works(breaker)


def test_an_operation_that_takes_too_long_opens_it_and_still_counts(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    breaker = breaker_of(clock)
    with breaker.attempt(3.0):
        clock.now += 4
    assert breaker.is_open and "took 4.0 s" in caplog.text


def test_one_that_hangs_keeps_others_from_hanging_with_it(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    breaker = breaker_of(clock)
    with breaker.attempt(3.0):
        clock.now += 2
        assert works(breaker)
        clock.now += 2
        assert not works(breaker)
        clock.now += 1000
        assert not works(breaker), "not before it has come back"
    clock.now += 61
    assert works(breaker)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2


@pytest.mark.parametrize(
    ("number", "reads_go_on"),
    [
        (errno.ENOSPC, True),
        (errno.EDQUOT, True),
        (errno.EROFS, True),
        (errno.EACCES, True),
        (errno.EIO, False),
        (errno.ESTALE, False),
        (errno.ENOTCONN, False),
        (errno.ENODEV, False),
    ],
)
def test_reads_go_on_where_only_writing_fails(number: int, reads_go_on: bool, caplog: pytest.LogCaptureFixture) -> None:
    health = FolderBreakers("/cache", Clock())
    with pytest.raises(TierError), health.writing():
        raise OSError(number, os.strerror(number))
    with pytest.raises(TierError), health.writing():
        pytest.fail("writes stop in any case")
    assert health.folder.is_open is not reads_go_on
    assert len(caplog.records) == 1 and os.strerror(number) in caplog.text


def test_errors_in_the_background_open_it_and_leave_the_next_try_alone() -> None:
    clock = Clock()
    health = FolderBreakers("/cache", clock)
    for _ in range(5):
        health.note(OSError(errno.EROFS, "read-only"))
        clock.now += 0.3
    with health.writes.attempt(math.inf):
        pass
    assert not health.writes.is_open


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """Mounts a disk of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)):
        pytest.skip("needs to be root and to mount")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], capture_output=True, check=False)


def mount(*arguments: str) -> int:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode


def fill_up(disk: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        (disk / "log").write_bytes(bytes(2 << 20))


def wait_for_pause(tier: FolderTier) -> None:
    """Ends the pause, so that the next operation is let through."""
    tier.breakers.folder._until = tier.breakers.writes._until = 0.0


def test_a_full_disk_stops_writes_and_is_cleared_by_eviction(mounted: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = quiet_tier(mounted, 4 << 20)
    for number in range(10):
        write(tier, number)
    fill_up(mounted)
    with pytest.raises(TierError, match="No space left"):
        write(tier, 10)
    with pytest.raises(TierError, match="out of order"):
        write(tier, 10)
    assert read(tier, 9) == content(9)
    assert not list((mounted / "tmp").iterdir())
    run_janitor(tier)
    assert tier.counters.evicted >= 2 and (mounted / "lease").stat().st_size
    wait_for_pause(tier)
    write(tier, 10)
    assert read(tier, 10) == content(10)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


def test_a_disk_that_is_smaller_than_the_limit_takes_its_place(mounted: Path) -> None:
    tier = quiet_tier(mounted, 4 << 20)
    written = 0
    for number in range(200):
        try:
            write(tier, number)
            written += 1
        except TierError:
            tier.janitor.tick()
    assert written > 100 and 0 < tier.counters.evicted < written
    assert tier.counters.full and not tier.counters.errors


def test_a_disk_that_others_fill_is_left_to_them(mounted: Path) -> None:
    tier = quiet_tier(mounted, 4 << 20)
    for number in range(20):
        write(tier, number)
    fill_up(mounted)
    for _ in range(5):
        tier.janitor.tick()
    assert 0 < tier.counters.evicted < 20
    assert os.statvfs(mounted).f_bavail > 0


def test_a_read_only_disk_serves_reads(mounted: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = quiet_tier(mounted)
    write(tier, 1)
    then = time.time() - 1000
    os.utime(file_of(mounted, 1), (then, then))
    assert mount("-o", "remount,ro", str(mounted)) == 0
    with pytest.raises(TierError, match="Read-only"):
        write(tier, 2)
    assert read(tier, 1) == content(1)
    assert tier.lookup([key(1), key(2)]) == [True, False]
    restarted = open_folder(str(mounted), 1 << 30, "auto", MODEL)
    assert read(restarted, 1) == content(1)
    restarted.close()
    assert mount("-o", "remount,rw", str(mounted)) == 0
    wait_for_pause(tier)
    write(tier, 2)
    assert read(tier, 2) == content(2)
    assert [record.levelname for record in caplog.records if "disk" in record.message][:1] == ["WARNING"]


def test_a_mount_that_vanishes_is_not_written_under_and_comes_back(mounted: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = mounted.with_name("kept")
    kept.mkdir()
    assert mount("--bind", str(mounted), str(kept)) == 0
    try:
        tier = quiet_tier(mounted)
        write(tier, 1)
        subprocess.run(["umount", str(mounted)], check=True)
        for operation in (lambda: read(tier, 1), lambda: write(tier, 2), lambda: tier.lookup([key(1)])):
            with pytest.raises(TierError):
                operation()
            wait_for_pause(tier)
            with pytest.raises(TierError):
                operation()
        assert not list(mounted.iterdir())
        assert mount("--bind", str(kept), str(mounted)) == 0
        wait_for_pause(tier)
        assert read(tier, 1) == content(1)
        assert len(caplog.records) == 2
    finally:
        subprocess.run(["umount", "-l", str(kept)], check=True)


def test_a_folder_that_people_emptied_is_made_again(tmp_path: Path) -> None:
    tier = quiet_tier(tmp_path)
    write(tier, 1)
    subprocess.run(f"rm -rf {tmp_path}/*", shell=True, check=True)
    with pytest.raises(ObjectMissing):
        read(tier, 1)
    write(tier, 1)
    assert read(tier, 1) == content(1)
    assert tier.counters.errors == 0


def test_a_folder_that_cannot_be_made_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = OSError(errno.EACCES, "Permission denied")

    def refuse(*_: object, **__: object) -> None:
        raise refused

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        tier = open_folder(str(tmp_path / "cache"), 1 << 30, "auto", MODEL)
        with pytest.raises(TierError):
            write(tier, 1)
        tier.close()  # its thread: what that does is done here
    tier.janitor.tick()
    wait_for_pause(tier)
    write(tier, 1)
    assert read(tier, 1) == content(1)


def read_nothing(tier: FolderTier) -> None:
    with pytest.raises(ObjectMissing):
        read(tier, 1)


def test_a_disk_that_hangs_stops_the_first_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = quiet_tier(tmp_path)
    write(tier, 1)
    stuck, go_on = threading.Event(), threading.Event()

    def hang(*_: object) -> int:
        stuck.set()
        go_on.wait()
        return 0

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", hang)
        patch.setattr("starling_engine.kv_offload.secondary.folder.tier.SLOW_READ", 0.1)
        thread = threading.Thread(target=read_nothing, args=(tier,))
        thread.start()
        stuck.wait()
        time.sleep(0.15)
        for _ in range(3):
            with pytest.raises(TierError):
                read(tier, 1)
    assert tier.counters.refused == 3
    go_on.set()
    thread.join()


def test_limits_in_bytes_are_kept_by_a_folder_that_is_out_of_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = quiet_tier(tmp_path, 3 * FILE)
    monkeypatch.setattr(os, "pwritev", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    for _ in range(10):
        with pytest.raises(TierError):
            write(tier, 1)
        wait_for_pause(tier)
    monkeypatch.undo()
    assert tier.counters.bytes == 0
    write(tier, 1)
    assert tier.counters.bytes == FILE


def test_what_comes_and_goes_is_logged_once_and_tried_less(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    breaker = breaker_of(clock)
    for _ in range(20):
        fail(breaker)
        while not works(breaker):
            clock.now += 1
    assert len(caplog.records) == 2
    assert clock.now > 100 + 10 * LONGEST_PAUSE
    fail(breaker)
    clock.now += LONGEST_PAUSE
    fail(breaker)
    clock.now += LONGEST_PAUSE
    fail(breaker)
    assert len(caplog.records) == 3, "now it lasts"
    clock.now += LONGEST_PAUSE
    assert works(breaker)
    assert len(caplog.records) == 4
    clock.now += LONGEST_PAUSE + 1
    fail(breaker)
    assert len(caplog.records) == 5
    clock.now += FIRST_PAUSE
    assert works(breaker)


def test_folders_that_people_removed_are_made_again_by_the_janitor(tmp_path: Path) -> None:
    tier = quiet_tier(tmp_path)
    run_janitor(tier)
    subprocess.run(["rm", "-rf", tmp_path / "tmp", tmp_path / "writers", tmp_path / "lease"], check=True)
    run_janitor(tier)
    assert (tmp_path / "lease").exists() and (tmp_path / "tmp").is_dir()
