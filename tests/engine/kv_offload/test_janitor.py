"""One of several processes evicts, by what all have written."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from starling_engine.kv_offload.secondary.base import TierError
from starling_engine.kv_offload.secondary.fingerprint import Fingerprint
from starling_engine.kv_offload.secondary.folder.janitor import FolderJanitor, Oldest
from starling_engine.kv_offload.secondary.folder.layout import FolderLayout, ObjectFile, walk_objects
from starling_engine.kv_offload.secondary.folder.tier import FolderBreakers, FolderTier
from starling_engine.kv_offload.secondary.folder.usage import (
    ABANDONED,
    DURATION,
    Amount,
    FolderCount,
    FolderLease,
    FolderUsage,
    UsageReports,
)

from tests.engine.kv_offload.objects import FILE, MODEL, file_of, quiet_tier, run_janitor, write

JANITOR = "starling_engine.kv_offload.secondary.folder.janitor"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def layout_of(root: Path, name: str) -> FolderLayout:
    layout = FolderLayout(root, MODEL.digest)
    layout.writer = name
    layout.make()
    return layout


def may_evict(lease: FolderLease, count: FolderCount | None = None) -> bool:
    """Takes or renews the lease where that is possible."""
    lease.look()
    if lease.is_free:
        lease.publish(count)
        return True
    return False


def test_one_holds_the_lease_and_another_takes_it_over_when_it_falls_silent(tmp_path: Path) -> None:
    clock = Clock()
    first, second = (FolderLease(layout_of(tmp_path, name), clock) for name in ("first", "second"))
    count = FolderCount(Amount(7, 1), {"first": Amount(3, 1)})
    for _ in range(5):
        clock.now += 0.7 * DURATION
        assert may_evict(first, count) and not may_evict(second)
    assert second.look() == count and first.look() is None, "nobody learns from itself"
    clock.now += DURATION + 1
    assert may_evict(second)
    assert not may_evict(first), "the one that was paused sees that it lost it"


def test_of_two_that_take_it_at_once_one_keeps_it(tmp_path: Path) -> None:
    leases = [FolderLease(layout_of(tmp_path, name)) for name in "ab"]
    for lease in leases:
        lease.look()
    for lease in leases:
        lease.publish(None)
    assert [may_evict(lease) for lease in leases] == [False, True]


def test_a_lease_that_was_given_back_is_free_and_keeps_the_count(tmp_path: Path) -> None:
    first, second = (FolderLease(layout_of(tmp_path, name)) for name in ("first", "second"))
    assert may_evict(first)
    first.publish(FolderCount(Amount(5, 1)), released=True)
    assert second.look() == FolderCount(Amount(5, 1)) and may_evict(second)


@pytest.mark.parametrize("garbage", [b"", b"{", b'{"owner": 3}'])
def test_a_damaged_lease_is_free(tmp_path: Path, garbage: bytes) -> None:
    lease = FolderLease(layout_of(tmp_path, "first"))
    (tmp_path / "lease").write_bytes(garbage)
    assert may_evict(lease) and may_evict(lease)


def test_whoever_opens_a_folder_that_was_counted_knows_at_once_what_it_holds(tmp_path: Path) -> None:
    """The last process that held the lease was killed."""
    killed = quiet_tier(tmp_path, 10 * FILE)
    fill(killed, range(5))
    run_janitor(killed)
    tier = quiet_tier(tmp_path, 10 * FILE)
    assert tier.counters.objects == 5
    fill(tier, range(10, 20))
    assert len(list(tmp_path.rglob("*.kv"))) == 10


def test_the_holder_adds_up_what_others_write_and_they_learn_the_sum(tmp_path: Path) -> None:
    holder, other = quiet_tier(tmp_path, 10 * FILE), quiet_tier(tmp_path, 10 * FILE)
    run_janitor(holder)
    for number in range(6):
        write(other, number)
    write(holder, 6)
    other.janitor.tick()
    holder.janitor.tick()
    holder.janitor.tick()
    other.janitor.tick()
    assert holder.counters.bytes == other.counters.bytes == 7 * FILE
    for number in range(10, 13):
        write(other, number)
    assert other.counters.bytes == 10 * FILE
    other.janitor.tick()
    holder.janitor.tick()
    assert (holder.counters.evicted, holder.counters.bytes) == (1, 9 * FILE)
    assert len(list(tmp_path.rglob("*.kv"))) == 9


@pytest.mark.parametrize("size", [1.5, 3.5, 4.5, 9.7, 24.9, 100.0])
def test_there_is_room_again_for_the_next_object(tmp_path: Path, size: float) -> None:
    """This holds, too, where less than one object fits between the high water mark and the limit."""
    limit = int(size * FILE)
    holder, other = quiet_tier(tmp_path, limit), quiet_tier(tmp_path, limit)
    run_janitor(holder)
    for number in range(2 * int(size)):
        for tier in (other, holder, holder, other):
            tier.janitor.tick()
        write(other, number)
    assert int(size) - 5 <= len(list(tmp_path.rglob("*.kv"))) <= int(size)
    assert holder.counters.evicted >= int(size)


def fill(tier: FolderTier, numbers: range) -> None:
    """Writes until there is no room."""
    with suppress(TierError):
        for number in numbers:
            write(tier, number)


def sweep_during(monkeypatch: pytest.MonkeyPatch, tier: FolderTier, *steps: Callable[[], None]) -> None:
    """The holder of the lease sweeps while these steps run, with a tick for each."""

    def walk_long(objects: Path) -> Iterator[list[ObjectFile]]:
        for step in steps:
            step()
            yield []
        yield from walk_objects(objects)

    with monkeypatch.context() as patch:
        patch.setattr(f"{JANITOR}.INTERVAL", -1.0)
        patch.setattr(f"{JANITOR}.RESCAN", -1.0)
        patch.setattr(f"{JANITOR}.walk_objects", walk_long)
        tier.janitor.tick()
        while tier.janitor._sweep:
            tier.janitor.tick()


@pytest.mark.parametrize("is_first", [True, False])
def test_the_limit_holds_while_all_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_first: bool) -> None:
    """The first count of a holder begins with what the last one knew; others do not."""
    before, holder, one, two = (quiet_tier(tmp_path, 100 * FILE) for _ in range(4))
    fill(before, range(40))
    run_janitor(before)
    before.janitor.leave()
    if not is_first:
        holder.janitor.tick()
    one.janitor.look()

    most = []

    def join() -> None:
        two.janitor.tick()
        fill(two, range(200, 300))
        two.janitor.tick()

    def write_on() -> None:
        fill(holder, range(300, 400))
        most.append(len(list(tmp_path.rglob("*.kv"))))

    sweep_during(monkeypatch, holder, lambda: fill(one, range(100, 150)), one.janitor.tick, join, write_on)
    assert most == [100]
    assert len(list(tmp_path.rglob("*.kv"))) == 95, "the same walk evicts"
    holder.janitor.tick()
    assert len(list(tmp_path.rglob("*.kv"))) == 95
    assert holder.counters.objects >= 95, "what was written during the walk may be counted twice"


def test_nothing_is_written_before_anybody_has_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease is lost: the folder may be as full as it may be."""
    fill(quiet_tier(tmp_path, 100 * FILE), range(90))
    holder, other = (quiet_tier(tmp_path, 100 * FILE) for _ in range(2))
    with pytest.raises(TierError, match="is not counted yet"):
        write(holder, 100)

    def try_it() -> None:
        other.janitor.tick()
        for tier in (holder, other):
            with pytest.raises(TierError, match="is not counted yet"):
                write(tier, 100)

    sweep_during(monkeypatch, holder, try_it)
    holder.janitor.tick()
    other.janitor.tick()
    assert other.counters.objects == 90
    fill(other, range(100, 200))
    assert len(list(tmp_path.rglob("*.kv"))) == 100


def test_a_holder_that_lost_the_lease_gives_its_sweep_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = quiet_tier(tmp_path, 10 * FILE)
    fill(holder, range(10))
    take_over = FolderLease(layout_of(tmp_path, "other"))
    sweep_during(monkeypatch, holder, lambda: take_over.publish(None), lambda: None)
    assert holder.counters.evicted == 0


def test_a_limit_that_was_lowered_takes_effect(tmp_path: Path) -> None:
    wide = quiet_tier(tmp_path, 100 * FILE)
    for number in range(50):
        write(wide, number)
    tier = quiet_tier(tmp_path, 10 * FILE)
    run_janitor(tier)
    tier.janitor.tick()
    assert len(list(tmp_path.rglob("*.kv"))) == tier.counters.objects == 9


def test_what_was_read_since_it_was_found_old_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = quiet_tier(tmp_path, 4 * FILE)
    for number in range(4):
        write(tier, number)
        os.utime(file_of(tmp_path, number), (number, number))
    used = file_of(tmp_path, 0)
    monkeypatch.setattr(Oldest, "__iter__", lambda oldest: os.utime(used) or iter(sorted(f for _, f in oldest._newest_first)))
    tier.janitor.tick()
    assert used.exists()


def test_the_oldest_are_as_many_as_are_asked_for() -> None:
    oldest = Oldest(25)
    for used in (5, 3, 9, 1, 7, 2):
        oldest.offer(ObjectFile(used, 10, str(used)))
    assert [found.used for found in oldest] == [1, 2, 3]
    none = Oldest(0)
    none.offer(ObjectFile(1, 10, "1"))
    assert not list(none)


def test_leftovers_of_the_dead_go_and_files_that_are_being_written_stay(tmp_path: Path) -> None:
    tier = quiet_tier(tmp_path)
    new, old = tmp_path / "tmp" / "new", tmp_path / "tmp" / "old"
    for path in (new, old):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 2 * ABANDONED,) * 2)
    run_janitor(tier)
    assert new.exists() and not old.exists()


def test_a_writer_with_nothing_new_to_report_stays_known(tmp_path: Path) -> None:
    """Its report is renewed before it is old enough to be removed: the next one would count all that it ever wrote as new."""
    clock = Clock()
    idle = UsageReports(layout_of(tmp_path, "idle"), clock)
    idle.publish(Amount())
    assert not list((tmp_path / "writers").iterdir()), "it has written nothing"
    idle.publish(Amount(7, 1))
    (report,) = (tmp_path / "writers").iterdir()
    for _ in range(8):
        clock.now += 0.6 * ABANDONED
        os.utime(report, (time.time() - 0.9 * ABANDONED,) * 2)  # as old as it is by that clock, at the most
        idle.publish(Amount(7, 1))
        assert time.time() - report.stat().st_mtime < 0.5 * ABANDONED
    assert UsageReports(layout_of(tmp_path, "other")).read() == {"idle": Amount(7, 1)}


def test_a_writer_that_ends_during_a_count_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk has missed what it wrote, and its report is removed right after."""
    holder, other = (quiet_tier(tmp_path, 100 * FILE) for _ in range(2))
    run_janitor(holder)
    fill(other, range(10))
    other.janitor.tick()

    def end() -> None:
        fill(other, range(10, 20))
        other.janitor.tick()
        for path in tmp_path.rglob("*.kv"):
            path.rename(path.with_suffix(".unseen"))
        for report in (tmp_path / "writers").iterdir():
            os.utime(report, (time.time() - 2 * ABANDONED,) * 2)

    sweep_during(monkeypatch, holder, end)
    assert not list((tmp_path / "writers").iterdir())
    for _ in range(2):
        holder.janitor.tick()
        assert holder.counters.objects == 10


def test_files_of_others_in_the_folder_are_let_alone(tmp_path: Path) -> None:
    tier = quiet_tier(tmp_path, 2 * FILE)
    strangers = [tmp_path / "notes.txt", tmp_path / "objects" / "notes.txt", tmp_path / "objects" / "ab" / "c" / "notes.txt"]
    strangers[2].parent.mkdir(parents=True)
    for path in strangers:
        path.write_bytes(bytes(5 * FILE))
    write(tier, 1)
    run_janitor(tier)
    assert all(path.exists() for path in strangers)
    assert tier.counters.bytes == FILE


def test_eviction_that_can_remove_nothing_is_not_tried_at_every_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = quiet_tier(tmp_path, 4 * FILE)
    for number in range(4):
        write(tier, number)
    tried = []
    monkeypatch.setattr(f"{JANITOR}.remove_unused", lambda found: tried.append(found) and False)
    for _ in range(6):
        tier.janitor.tick()
    assert len(tried) == 1


def test_what_is_being_written_is_neither_evicted_nor_forgotten(tmp_path: Path) -> None:
    """It takes the folder over its high mark, but there is nothing yet that could go."""
    tier = quiet_tier(tmp_path, 20 * FILE)
    for number in range(19):
        write(tier, number)
    assert tier._usage.reserve(FILE)
    run_janitor(tier)
    assert (tier.counters.evicted, tier.counters.objects) == (0, 20)
    tier._usage.settle(FILE, placed=False)
    write(tier, 19)
    run_janitor(tier)
    assert tier.counters.evicted == 1


def test_closing_does_not_wait_for_a_walk(tmp_path: Path) -> None:
    layout = layout_of(tmp_path, "one")
    janitor = FolderJanitor(layout, FolderUsage(1 << 30, "one"), FolderBreakers(tmp_path).note)
    janitor.start()
    janitor.stop()
    janitor._thread.join(20)
    assert not janitor._thread.is_alive()


@pytest.mark.parametrize("wrote", [MODEL, replace(MODEL, layout="another")])
def test_objects_of_another_layout_are_told_of_and_left_alone(
    wrote: Fingerprint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An upgrade has changed what a chunk has."""
    caplog.set_level(logging.INFO, "starling.tiers")
    earlier = quiet_tier(tmp_path, 100 * FILE, wrote)
    run_janitor(earlier)
    for number in range(3):
        write(earlier, number)
    earlier.janitor.leave()
    assert "objects" not in caplog.text, "nothing is there yet"
    tier = quiet_tier(tmp_path, 100 * FILE)
    for _ in range(3):
        run_janitor(tier)
    assert caplog.text.count("holds 3 objects") == (wrote != MODEL)
    assert tier.counters.objects == 3 and len([found for folder in walk_objects(tmp_path / "objects") for found in folder]) == 3
