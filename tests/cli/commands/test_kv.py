"""`starling kv` on folders that an engine has written."""

import errno
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
from starling_cli.commands.kv import format_bytes, parse_age
from starling_engine.kv_offload.secondary.base import ChunkPart
from starling_engine.kv_offload.secondary.folder.object_file import encode_header, read_header

from tests.cli.commands.running import starling, starling_process
from tests.engine.kv_offload.objects import FILE, MODEL, content, file_of, quiet_tier, read, run_janitor, write

OTHER = replace(MODEL, model="org/other@commit", identity="other", dtype="bfloat16")
DAY = 86400


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three objects of one model, numbers 0 to 2 and so many days old, and one of another."""
    tier, other = quiet_tier(tmp_path), quiet_tier(tmp_path, fingerprint=OTHER)
    now = time.time()
    for number in range(3):
        write(tier, number)
        os.utime(file_of(tmp_path, number), (now - number * DAY - 60,) * 2)
    write(other, 0)
    return tmp_path


def numbers(folder: Path) -> list[int]:
    return [number for number in range(3) if file_of(folder, number).exists()]


def test_ls_shows_models_objects_and_bytes(folder: Path) -> None:
    lines = starling("kv", "ls", folder).stdout.splitlines()
    assert lines[1].split()[:4] == [MODEL.digest.hex()[:16], "3", "48.00", "KiB"]
    assert lines[1].endswith("org/model@commit float32")
    assert lines[2].endswith("org/other@commit bfloat16")
    assert lines[-1].split() == ["total", "4", "64.00", "KiB"]


def test_ls_as_json(folder: Path) -> None:
    first, second = json.loads(starling("kv", "ls", folder, "--json").stdout)
    assert (first["model"], first["objects"], first["bytes"]) == ("org/model@commit", 3, 3 * FILE)
    assert first["newest"] - first["oldest"] == pytest.approx(2 * DAY, abs=1)
    assert second["fingerprint"] == OTHER.digest.hex()[:16]


def test_verify_names_what_is_damaged_and_removes_it_when_asked(folder: Path) -> None:
    assert starling("kv", "verify", folder).returncode == 0
    path = file_of(folder, 1)
    data = bytearray(path.read_bytes())
    data[8000] ^= 1
    path.write_bytes(data)
    file_of(folder, 2).rename(file_of(folder, 2).with_name(f"moved-{MODEL.digest.hex()[:16]}.kv"))
    os.truncate(file_of(folder, 0), 5000)
    answer = starling("kv", "verify", folder)
    assert answer.returncode == 1
    assert f"{path} has damaged data" in answer.stdout
    assert "is another object's file" in answer.stdout and "has 5000 bytes" in answer.stdout
    assert answer.stdout.endswith("3 damaged\n") and path.exists()
    assert "3 damaged and removed" in starling("kv", "verify", folder, "--delete").stdout
    assert starling("kv", "verify", folder).stdout.startswith("1 objects")


def test_purge_wants_a_confirmation(folder: Path) -> None:
    refused = starling("kv", "purge", folder, input="n\n")
    assert refused.returncode == 1 and "4 objects, 64.00 KiB of 2 models" in refused.stdout
    assert numbers(folder) == [0, 1, 2]
    assert "removed 4 objects" in starling("kv", "purge", folder, input="y\n").stdout
    assert not list(folder.rglob("*.kv"))


def test_purge_by_age_and_by_model(folder: Path) -> None:
    assert "removed 1 objects, 16.00 KiB" in starling("kv", "purge", folder, "--older-than", "36h", "--yes").stdout
    assert numbers(folder) == [0, 1]
    assert "removed 1 objects" in starling("kv", "purge", folder, "--model", OTHER.digest.hex()[:6], "--yes").stdout
    assert numbers(folder) == [0, 1]


def test_an_engine_that_uses_the_folder_goes_on(folder: Path) -> None:
    tier = quiet_tier(folder)
    run_janitor(tier)
    assert read(tier, 0) == content(0)
    starling("kv", "purge", folder, "--yes")
    write(tier, 0)
    assert read(tier, 0) == content(0)


@pytest.mark.parametrize("command", ["ls", "verify", "purge"])
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (".", "holds no KV cache"),
        ("nowhere", "does not exist"),
        ("file", "is a file, not a folder"),
        ("file/below", "does not exist"),
        ("half", "holds no KV cache"),
    ],
)
def test_a_path_without_a_cache_is_reported(tmp_path: Path, command: str, name: str, problem: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "objects").write_text("")
    answer = starling("kv", command, tmp_path / name)
    assert answer.returncode == 2
    assert answer.stderr.splitlines()[0] == f"error: {tmp_path / name} {problem}" and "--kv-fs-path" in answer.stderr


def denied(path: object, *_: object, **__: object) -> NoReturn:
    raise PermissionError(errno.EACCES, "Permission denied", str(path))


@pytest.mark.parametrize("command", ["ls", "verify", "purge"])
def test_a_folder_that_may_not_be_read_is_reported(folder: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.scandir", denied)
    answer = starling("kv", command, folder, input="y\n")
    assert answer.returncode == 2
    assert answer.stderr.splitlines()[0] == f"error: {folder / 'objects'}: permission denied"


def test_what_cannot_be_read_is_neither_whole_nor_damaged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starling_engine.kv_offload.secondary.folder.inspect.os.preadv", denied)
    answer = starling("kv", "verify", folder, "--delete")
    assert answer.returncode == 1
    assert "cannot be read: Permission denied" in answer.stdout and answer.stdout.endswith("0 damaged, 4 that cannot be read\n")
    assert numbers(folder) == [0, 1, 2]
    assert starling("kv", "ls", folder).returncode == 0, "names that are not known"


def test_what_cannot_be_removed_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = file_of(folder, 1)
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda path: denied(path) if path == kept else unlink(path))
    answer = starling("kv", "purge", folder, "--yes")
    assert answer.returncode == 1
    assert "removed 3 objects, 48.00 KiB" in answer.stdout
    assert f"1 objects could not be removed, the first is {kept}: Permission denied" in answer.stderr
    assert list(folder.rglob("*.kv")) == [kept]


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "no hex"},
        {"fingerprint": "no hex"},
        {"part": ChunkPart(-4, 0, 0, 2)},
        {"bytes": -1},
        {"layers": []},
    ],
)
def test_a_header_that_makes_no_sense_is_damage(folder: Path, changes: dict[str, Any]) -> None:
    path = file_of(folder, 0)
    header = msgspec.structs.replace(read_header(path), **changes)
    path.write_bytes(encode_header(header).ljust(FILE, b"\0"))
    answer = starling("kv", "verify", folder)
    assert answer.returncode == 1 and f"{path} has a header that" in answer.stdout
    assert starling("kv", "ls", folder).returncode == 0


def test_wrong_ages_are_refused(folder: Path) -> None:
    answer = starling("kv", "purge", folder, "--older-than", "yesterday", "--yes")
    assert answer.returncode == 2 and "7d" in answer.stderr
    assert [parse_age(text) for text in ("90s", "30m", "12h", "7d", "2w")] == [90, 1800, 43200, 7 * DAY, 14 * DAY]
    assert [format_bytes(size) for size in (300, 12 << 10, 3 << 29, 1 << 40)] == ["300 B", "12.00 KiB", "1.50 GiB", "1.00 TiB"]


def test_it_needs_no_torch(folder: Path) -> None:
    answer = starling_process("kv", "verify", folder, PYTHONPROFILEIMPORTTIME="1")
    assert answer.returncode == 0
    assert "starling_engine.kv_offload.secondary.folder" in answer.stderr
    assert not {"torch", "numpy"} & {line.rpartition("|")[2].strip() for line in answer.stderr.splitlines()}
