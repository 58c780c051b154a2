"""Objects are read as they were written, or not at all."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from starling_engine.errors import ConfigError
from starling_engine.kv_offload.secondary.base import ChunkPart, ObjectMissing, TierError
from starling_engine.kv_offload.secondary.folder.object_file import supports_direct
from starling_engine.kv_offload.secondary.folder.tier import open_folder

from tests.engine.kv_offload.objects import FILE, MODEL, SIZE, content, file_of, key, memory, quiet_tier, read, run_janitor, write


def test_a_restart_finds_what_was_written(tmp_path: Path) -> None:
    first = open_folder(str(tmp_path / "new" / "folder"), 1 << 30, "auto", MODEL)
    write(first, 1)
    first.close()
    second = open_folder(str(tmp_path / "new" / "folder"), 1 << 30, "auto", MODEL)
    assert second.lookup([key(1), key(2)]) == [True, False]
    assert read(second, 1) == content(1)
    with pytest.raises(ObjectMissing):
        read(second, 2)
    second.close()


@pytest.mark.parametrize("writes_direct", [False, True])
@pytest.mark.parametrize("reads_direct", [False, True])
@pytest.mark.parametrize("at", [0, 8])
@pytest.mark.parametrize("size", [4, 4096, 4 * 4096, 4 * 5000])
def test_every_way_to_write_suits_every_way_to_read(
    tmp_path: Path, writes_direct: bool, reads_direct: bool, at: int, size: int
) -> None:
    if (writes_direct or reads_direct) and not supports_direct(tmp_path / "probe"):
        pytest.skip("the file system knows no O_DIRECT")
    data = content(size, size)
    quiet_tier(tmp_path, direct=writes_direct).write(key(1), memory(data, at))
    assert read(quiet_tier(tmp_path, direct=reads_direct), 1, size, at) == data


def test_bytes_that_cannot_be_written_to_are_data_too(tmp_path: Path) -> None:
    tier = quiet_tier(tmp_path, direct=bool(supports_direct(tmp_path / "probe")))
    tier.write(key(1), memoryview(content(1)))
    assert read(tier, 1) == content(1)


def test_parts_groups_and_models_are_apart(tmp_path: Path) -> None:
    tier = quiet_tier(tmp_path)
    write(tier, 1)
    assert tier.lookup([key(1), key(1, ChunkPart(0, 4, 2, 4)), key(1, group=1)]) == [True, False, False]
    for other in (replace(MODEL, identity="org/model@other"), replace(MODEL, dtype="bfloat16"), replace(MODEL, layout="another")):
        assert quiet_tier(tmp_path, fingerprint=other).lookup([key(1)]) == [False]


def test_what_is_there_stays(tmp_path: Path) -> None:
    tier = quiet_tier(tmp_path)
    write(tier, 1)
    before = file_of(tmp_path, 1).stat().st_ino
    write(tier, 1)
    assert file_of(tmp_path, 1).stat().st_ino == before
    assert (tier.counters.objects, tier.counters.bytes) == (1, FILE)


def test_no_half_of_an_object_is_ever_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = quiet_tier(tmp_path)
    whole = os.pwritev
    steps = []

    def a_page_at_a_time(fd: int, parts: list[memoryview], offset: int) -> int:
        steps.append(tier.lookup([key(1)]))
        return whole(fd, [parts[0][:4096]], offset)

    monkeypatch.setattr(os, "pwritev", a_page_at_a_time)
    write(tier, 1)
    assert steps == [[False]] * 4
    assert read(tier, 1) == content(1)


def test_a_read_that_stops_early_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = quiet_tier(tmp_path)
    write(tier, 1)
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: whole(fd, [parts[0][:1000]], at))
    assert read(tier, 1) == content(1)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "magic": lambda path: flip(path, 0),
    "format": lambda path: flip(path, 8),
    "header": lambda path: flip(path, 100),
    "first layer": lambda path: flip(path, 4096),
    "last byte": lambda path: flip(path, 4096 + SIZE - 1),
    "cut in the header": lambda path: os.truncate(path, 1000),
    "cut in the data": lambda path: os.truncate(path, 5000),
    "empty": lambda path: os.truncate(path, 0),
    "torn": lambda path: path.write_bytes(path.read_bytes()[:8192] + bytes(FILE - 8192)),
    "another key's": lambda path: path.write_bytes(file_of(path.parents[3], 2).read_bytes()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_dropped_and_counted(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    tier = quiet_tier(tmp_path)
    write(tier, 1)
    write(tier, 2)
    path = file_of(tmp_path, 1)
    DAMAGES[damage](path)
    with pytest.raises(ObjectMissing):
        read(tier, 1)
    assert not path.exists()
    assert tier.counters.corrupt == 1
    assert caplog.text.count(path.name) == 1
    write(tier, 1)
    assert read(tier, 1) == content(1)
    assert tier.counters.errors == 0


def test_another_models_object_under_ones_own_name_is_not_used(tmp_path: Path) -> None:
    other = replace(MODEL, identity="a fine-tune")
    write(quiet_tier(tmp_path, fingerprint=other), 1)
    path = file_of(tmp_path, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    file_of(tmp_path, 1, other).rename(path)
    tier = quiet_tier(tmp_path)
    with pytest.raises(ObjectMissing, match="is another's"):
        read(tier, 1)
    assert tier.counters.corrupt == 1


def test_another_length_is_not_used(tmp_path: Path) -> None:
    tier = quiet_tier(tmp_path)
    write(tier, 1)
    with pytest.raises(ObjectMissing):
        read(tier, 1, size=SIZE - 4)


def test_the_least_recently_used_goes_and_restarts_do_not_forget_the_order(tmp_path: Path) -> None:
    limit = 10 * FILE
    tier = quiet_tier(tmp_path, limit)
    long_ago = time.time() - 1000
    for number in range(8):
        write(tier, number)
        os.utime(file_of(tmp_path, number), (long_ago + number, long_ago + number))
    assert read(tier, 0) == content(0)
    run_janitor(tier)
    tier.janitor.leave()
    tier = quiet_tier(tmp_path, limit)
    run_janitor(tier)
    for number in (8, 9):
        write(tier, number)
    tier.janitor.tick()
    assert tier.lookup([key(number) for number in range(10)]) == [True, False, *[True] * 8]
    assert (tier.counters.objects, tier.counters.bytes, tier.counters.evicted) == (9, 9 * FILE, 1)


def test_it_never_holds_more_than_its_limit(tmp_path: Path) -> None:
    tier = quiet_tier(tmp_path, 5 * FILE)
    for number in range(5):
        write(tier, number)
    with pytest.raises(TierError, match="no room"):
        write(tier, 5)
    counters = tier.counters
    assert (counters.objects, counters.full, counters.refused, counters.errors) == (5, 1, 0, 0)
    run_janitor(tier)
    write(tier, 5)
    assert read(tier, 5) == content(5)


def test_the_janitor_evicts_by_itself(tmp_path: Path) -> None:
    tier = open_folder(str(tmp_path), 20 * FILE, "off", MODEL)
    number = written = 0
    until = time.monotonic() + 20
    while tier.counters.evicted < 20 and time.monotonic() < until:
        try:
            write(tier, number)
            written += 1
        except TierError:
            time.sleep(0.02)
        number += 1
        assert len(list(tmp_path.rglob("*.kv"))) <= 20
    tier.close()
    assert tier.counters.evicted >= 20
    assert len(list(tmp_path.rglob("*.kv"))) == (held := written - tier.counters.evicted)
    assert held <= tier.counters.objects <= held + 1, "what was written during the last walk may be counted twice"


def test_a_hit_marks_its_use_no_more_than_now_and_then(tmp_path: Path) -> None:
    tier = quiet_tier(tmp_path)
    write(tier, 1)
    path = file_of(tmp_path, 1)
    for age, marked in ((30, False), (100, True)):
        then = time.time() - age
        os.utime(path, (then, then))
        read(tier, 1)
        assert (path.stat().st_mtime > then + 1) is marked


def test_threads_that_write_read_and_drop_the_same_objects_get_the_right_bytes(tmp_path: Path) -> None:
    tier = quiet_tier(tmp_path, direct=bool(supports_direct(tmp_path / "probe")))

    def use(worker: int) -> int:
        hits = 0
        for step in range(60):
            number = (7 * worker + step) % 5
            write(tier, number)
            if step % 7 == worker:
                file_of(tmp_path, number).unlink(missing_ok=True)
            try:
                assert read(tier, number, at=8 * (step % 2)) == content(number)
                hits += 1
            except ObjectMissing:
                pass
        return hits

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(use, range(4))) > 100
    assert (tier.counters.corrupt, tier.counters.errors) == (0, 0)
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize(("arguments", "field"), [({"limit": 0}, "kv_fs_bytes"), ({"path": "file"}, "kv_fs_path")])
def test_what_can_never_work_is_refused(tmp_path: Path, arguments: dict[str, object], field: str) -> None:
    (tmp_path / "file").write_text("")
    path = str(tmp_path / str(arguments.get("path", "folder")))
    with pytest.raises(ConfigError, match=field):
        open_folder(path, int(str(arguments.get("limit", 1))), "auto", MODEL)
