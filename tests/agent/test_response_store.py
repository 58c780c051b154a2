"""The stores of responses: their limits, whose the responses are, and what a folder that pods share survives."""

import asyncio
import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from starling_agent.http.errors import ApiError
from starling_agent.openai.responses import folder_store
from starling_agent.openai.responses.folder_store import (
    LITTER_SECONDS,
    LOST_SECONDS,
    PART,
    FileStamp,
    FolderStore,
    room_of_full_disk,
    surplus,
)
from starling_agent.openai.responses.ids import ResponsePod, is_response_id, new_response_id, pod_of
from starling_agent.openai.responses.memory_store import MemoryStore
from starling_agent.openai.responses.store import ResponseStore, StoredResponse, StoreLimits
from starling_engine.errors import ConfigError

A, B, C = (f"resp_{letter * 32}" for letter in "abc")
OF_OTHERS = f"resp_chat-1a2b3c4-0-1_{'0' * 32}"
LIMITS = StoreLimits(100_000, 3600.0)
MakeStore = Callable[..., ResponseStore]


@pytest.fixture(params=["memory", "folder"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    if request.param == "memory":
        return MemoryStore
    return lambda limits, pod="": FolderStore(tmp_path / "new" / "folder", limits, pod)


def response(size: int = 10, owner: str | None = None, status: str = "completed") -> StoredResponse:
    return StoredResponse(owner, status, msgspec.json.encode({"status": status, "text": "x" * size}), b"[1]", b"[]", True, b"e\n\n")


async def missing(store: ResponseStore, response_id: str, owner: str | None = None) -> str:
    """Returns the message of the 404."""
    with pytest.raises(ApiError) as error:
        await store.get(response_id, owner)
    assert error.value.status == 404
    return error.value.detail.message


async def has(store: ResponseStore, response_id: str) -> bool:
    with suppress(ApiError):
        return bool(await store.get(response_id, None))
    return False


async def test_what_is_put_is_found_until_it_is_deleted(make):
    store = make(LIMITS)
    await store.put(A, response())
    assert await store.get(A, None) == response()
    await store.update(A, response(20))
    assert await store.get(A, None) == response(20)
    await store.delete(A, None)
    await store.update(A, response())
    await missing(store, A)


async def test_a_response_is_its_owners(make):
    store = make(LIMITS)
    await store.put(A, response(10, "one"))
    for owner in (None, "two"):
        await missing(store, A, owner)
        with pytest.raises(ApiError):
            await store.delete(A, owner)
    await store.delete(A, "one")
    await missing(store, A, "one")


async def test_older_ones_give_way(make):
    store = make(LIMITS)
    for name in (A, B, C):
        await store.put(name, response(40_000))
        await asyncio.sleep(0.02)  # times of files have a tick
    async with asyncio.timeout(60):
        while await has(store, A):  # noqa: ASYNC110 - a folder has no events
            await asyncio.sleep(0.01)
    assert await store.get(C, None) == response(40_000)
    assert (store.takes(25_000), store.takes(25_001)) == (True, False)


async def test_a_response_that_grew_makes_older_ones_give_way(make):
    store = make(LIMITS)
    for name in (A, B):
        await store.put(name, response())
        await asyncio.sleep(0.02)
    await store.update(B, response(100_000 - 50))
    async with asyncio.timeout(60):
        while await has(store, A):  # noqa: ASYNC110 - a folder has no events
            await asyncio.sleep(0.01)


async def test_a_response_that_is_too_old_is_gone(make):
    store = make(StoreLimits(100_000, 0.02))
    await store.put(A, response())
    await asyncio.sleep(0.05)
    await missing(store, A)


async def test_a_running_response_that_was_deleted_is_not_kept(make):
    store = make(LIMITS)
    await store.put(A, response(status="in_progress"))
    assert not await store.keep(A)
    await store.delete(A, None)
    assert await store.keep(A)


async def test_the_least_recently_used_gives_way_in_memory():
    store = MemoryStore(LIMITS)
    for name in (A, B):
        await store.put(name, response(40_000))
    await store.get(A, None)
    await store.put(C, response(40_000))
    await missing(store, B)
    assert await store.get(A, None)
    await store.put(B, response(100_001))
    assert store.bytes == 0


async def test_the_owner_with_the_most_bytes_gives_way_and_what_runs_stays() -> None:
    """So nobody's key empties the store of the others."""
    store = MemoryStore(LIMITS)
    await store.put(A, response(20_000, "quiet"))
    await store.put(B, response(20_000, "running", "in_progress"))
    for number in range(20):
        await store.put(f"resp_{number:032}", response(25_000, "busy"))
    assert await store.get(A, "quiet") and await store.get(B, "running") and await store.get(f"resp_{19:032}", "busy")
    await missing(store, f"resp_{17:032}", "busy")
    for name in (A, B, f"resp_{18:032}", f"resp_{19:032}"):
        await store.delete(name, (await store._find(name)).owner)
    assert store.bytes == 0 and not store._bytes and not store._ids


async def test_pods_share_a_folder(tmp_path):
    one, two = (FolderStore(tmp_path, LIMITS, f"chat-1a2b3c4-0-{node}") for node in (0, 1))
    await one.put(A, response(10, "digest", "in_progress"))
    assert (await two.get(A, "digest")).is_running
    assert not await one.keep(A)
    await two.ask_to_cancel(A)
    assert await one.keep(A)
    await one.update(A, response(10, "digest", "cancelled"))
    assert (await two.get(A, "digest")).status == "cancelled"
    assert [file.name for file in tmp_path.iterdir()] == [A], "nothing else stays"
    assert (tmp_path / A).stat().st_mode & 0o077 == 0, "it is a private text"


async def test_a_response_whose_pod_is_gone_has_failed(tmp_path):
    store = FolderStore(tmp_path, LIMITS)
    for name, status in ((A, "in_progress"), (B, "completed")):
        await store.put(name, response(status=status))
        os.utime(tmp_path / name, (0, time.time() - LOST_SECONDS - 1))
    failed = await store.get(A, None)
    assert (failed.status, msgspec.json.decode(failed.response)["error"]["code"]) == ("failed", "server_error")
    assert (await store.get(B, None)).status == "completed"


@pytest.mark.parametrize("damage", [lambda data: data[:0], lambda data: data[:-3], lambda data: data[:40] + b"!" + data[41:]])
async def test_a_damaged_file_is_no_response(tmp_path, damage):
    store = FolderStore(tmp_path, LIMITS)
    await store.put(A, response())
    (tmp_path / A).write_bytes(damage((tmp_path / A).read_bytes()))
    await missing(store, A)


@pytest.mark.parametrize("name", ["../secret", "resp_../../secret", f"{A}/../x", f"{A}.cancel", "", "resp_", A.upper(), f"{A}\n"])
async def test_no_id_leaves_the_folder(tmp_path, name):
    (tmp_path / "secret").write_text("x")
    await missing(FolderStore(tmp_path / "store", LIMITS), name)
    assert not is_response_id(name)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be written") as error:
        FolderStore(tmp_path / "file", LIMITS)
    assert error.value.field == "response_store"


async def test_a_full_disk_is_no_response(tmp_path):
    store = FolderStore(tmp_path / "folder", LIMITS)
    (tmp_path / "folder").rmdir()
    assert not await store.try_to_put(A, response())
    assert not await store.keep(A), "nobody has deleted it"


async def test_a_full_disk_gets_room(tmp_path, monkeypatch):
    def full() -> None:
        raise OSError(errno.ENOSPC, "full")

    store = FolderStore(tmp_path, LIMITS)
    monkeypatch.setattr(folder_store, "FULL_SWEEP_SECONDS", 3600.0)
    for name in (A, B):
        await store.put(name, response())
        await asyncio.sleep(0.02)
    with pytest.raises(OSError, match="full"):
        await store._written(full)
    await asyncio.sleep(0.05)
    assert await has(store, A), "it was swept a moment ago"
    monkeypatch.setattr(folder_store, "FULL_SWEEP_SECONDS", 0.0)
    with pytest.raises(OSError, match="full"):
        await store._written(full)
    async with asyncio.timeout(60):
        while await has(store, A):  # noqa: ASYNC110 - a folder has no events
            await asyncio.sleep(0.01)
    assert await has(store, B)


@pytest.mark.parametrize(("sizes", "room"), [([160, 160], 300), ([1600], 1500), ([16000], 2000), ([], 0)])
def test_the_room_of_a_full_disk(sizes, room):
    files = [FileStamp(1.0, size, A) for size in sizes] + [FileStamp(1.0, 999, "notes.txt")]
    assert room_of_full_disk(files, StoreLimits(2000, 800.0)) == StoreLimits(room, 800.0)


async def test_what_another_pod_deletes_stays_deleted(tmp_path, monkeypatch):
    one, two = FolderStore(tmp_path, LIMITS), FolderStore(tmp_path, LIMITS)
    await one.put(A, response(status="in_progress"))
    encode = msgspec.msgpack.encode

    def deleted_meanwhile(stored: StoredResponse) -> bytes:
        (tmp_path / A).unlink()
        return encode(stored)

    monkeypatch.setattr(msgspec.msgpack, "encode", deleted_meanwhile)
    await one.update(A, response())
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())
    await missing(two, A)


@pytest.mark.parametrize(
    ("files", "gone"),
    [
        ([], []),
        ([(990, 40, A), (980, 40, B), (970, 40, C)], [C]),
        ([(990, 10, A), (100, 10, B)], [B]),
        ([(990, 101, A)], [A]),
        ([(990, 10, "notes.txt"), (1, 1000, "notes.txt")], []),
        ([(1000 - LITTER_SECONDS - 1, 0, f"{A}.cancel"), (1000 - LITTER_SECONDS - 1, 9, f"{PART}x"), (990, 9, f"{PART}y")],
         [f"{A}.cancel", f"{PART}x"]),
        ([(1, 9, "video.part"), (1, 9, "order.cancel")], []),
    ],
)  # fmt: skip
def test_what_has_to_go(files, gone):
    stamps = [FileStamp(*file) for file in files]
    assert sorted(surplus(stamps, 1000.0, StoreLimits(100, 800.0))) == sorted(gone)


@pytest.mark.parametrize(
    ("response_id", "maker"),
    [
        (OF_OTHERS, ResponsePod("chat-1a2b3c4-0", 1)),
        (A, None),
        ("resp_chat_" + "0" * 32, None),
        ("chatcmpl-1", None),
    ],
)
def test_an_id_names_the_pod_that_made_it(response_id, maker):
    assert pod_of(response_id) == maker


def test_ids_of_pods():
    assert pod_of(new_response_id("chat-1a2b3c4-0-1")) == ResponsePod("chat-1a2b3c4-0", 1)
    assert is_response_id(new_response_id("")) and is_response_id(new_response_id("an odd/name"))


@pytest.mark.parametrize(
    ("pod", "folder", "says"),
    [
        ("chat-1a2b3c4-0-0", False, "node 1 of the group chat-1a2b3c4-0 made it"),
        ("chat-1a2b3c4-0-1", False, "it was deleted"),
        ("chat-1a2b3c4-0-0", True, "it was deleted"),
    ],
)
async def test_the_404_says_who_has_the_response(tmp_path, pod, folder, says):
    store = FolderStore(tmp_path, LIMITS, pod) if folder else MemoryStore(LIMITS, pod)
    assert says in await missing(store, OF_OTHERS)
