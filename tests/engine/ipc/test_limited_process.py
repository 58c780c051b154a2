"""A limited process answers, whatever a job does; chats are tested in `test_render_process.py`, where jobs are done in place."""

import asyncio
import gc
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starling_engine.errors import InvalidRequest, ModelError, QueueFull, RequestFailed
from starling_engine.ipc import limited_process
from starling_engine.ipc.limited_child import ProcessLimits
from starling_engine.ipc.limited_process import JobWords, LimitedProcess

LIMITS = ProcessLimits(seconds=0.2, answer_seconds=30.0, memory_bytes=48 << 20)


def made(limits: ProcessLimits = LIMITS, *, broken: bool = False, max_waiting: int = 8) -> LimitedProcess:
    words = JobWords("job", "jobs", "done")
    return LimitedProcess("tests.engine.ipc.jobs", {"broken": broken}, limits, words, max_waiting=lambda: max_waiting)


@pytest.fixture(scope="module")
def process() -> Iterator[LimitedProcess]:
    process = made()
    yield process
    process.close()


async def say(process: LimitedProcess, text: str) -> int:
    """Has a text said, and returns the process that says it."""
    said, pid = await process.answer({"say": text}, "job")
    assert said == text
    return int(pid)


async def test_one_copy_does_jobs_until_it_meets_a_limit(process: LimitedProcess) -> None:
    copy = await say(process, "one \ud800")
    assert copy == await say(process, "two") != process.pid
    with pytest.raises(InvalidRequest, match="not today") as caught:
        await process.answer({"refuse": "not today"}, "job")
    assert caught.value.param == "job.reason"
    with pytest.raises(ModelError, match="no such job"):
        await process.answer({}, "job")
    assert copy == await say(process, "three")


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({"power": 10**8}, "the job takes more than 0.2 s of processor time"),
        ({"keep": 1 << 30}, "the job takes more than 48 MiB of memory"),
        ({"signal": signal.SIGABRT}, "the job takes more than 48 MiB of memory"),
        ({"signal": signal.SIGKILL}, "the job takes more than 48 MiB of memory"),
        ({"signal": signal.SIGSEGV}, "the job is nested too deeply"),
        ({"read": 0}, "the job is nested too deeply"),
        ({"exit": 0}, "makes the library fail"),
        ({"exit": 3}, "makes the library fail"),
        ({"signal": signal.SIGTRAP}, "makes the library fail"),
    ],
)
async def test_limits_are_named_and_cost_only_the_copy(job: dict[str, Any], words: str, process: LimitedProcess) -> None:
    copy, pid = await say(process, "before"), process.pid
    with pytest.raises(InvalidRequest, match=words) as caught:
        await process.answer(job, "the field")
    assert caught.value.param == "the field"
    assert await say(process, "after") != copy or "keep" in job
    assert process.pid == pid


async def test_processor_time_is_limited_to_what_is_named() -> None:
    process = made()
    with pytest.raises(InvalidRequest, match="processor time"):
        await process.answer({"power": 10**8}, "job")
    assert 0.1 < _processor_seconds_of_ended_copies(process) < 0.5
    process.close()


async def test_memory_left_by_earlier_jobs_fails_no_later_one(process: LimitedProcess) -> None:
    counts = [await process.answer({"keep": 8 << 20}, "job") for _ in range(8)]
    assert max(counts) == 2 and counts.count(1) >= 4
    assert await process.answer({"keep": 32 << 20}, "job") <= 2


async def test_a_late_job_ends_the_process() -> None:
    process = made(replace(LIMITS, answer_seconds=0.5))
    before = await say(process, "before")
    with pytest.raises(InvalidRequest, match=r"the job did not end within 0.5 s"):
        await process.answer({"sleep": 60}, "job")
    assert process.pid is None and before != await say(process, "after")
    process.close()


async def test_a_process_that_was_killed_is_replaced(process: LimitedProcess) -> None:
    await say(process, "before")
    killed = process.pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, killed, os.WEXITED | os.WNOWAIT)
    await say(process, "after")
    assert process.pid not in (killed, None)


async def test_a_process_that_was_not_ready_in_time_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process's first word would be taken for the answer to a job, and each answer for that to the job behind it."""
    process = made()
    with monkeypatch.context() as late:
        late.setattr(limited_process, "START_SECONDS", 0.0)
        process.warm_up()
        with pytest.raises(RequestFailed):
            await process.answer({"say": "too early"}, "job")
        process.warm_up()
        await asyncio.to_thread(process._thread.submit(int).result)
    await say(process, "after")
    process.close()


async def test_a_copy_ends_with_its_process() -> None:
    process = made()
    copy = await say(process, "before")
    process.close()
    async with asyncio.timeout(60):
        while _is_alive(copy):  # noqa: ASYNC110 - it is no child of this process
            await asyncio.sleep(0.01)


async def test_a_process_that_cannot_begin_says_why() -> None:
    process = made(broken=True)
    for _ in range(2):
        with pytest.raises(ModelError, match="nothing to do jobs with"):
            await process.answer({"say": "a"}, "job")
    process.close()


async def test_waiting_jobs_are_bounded_and_end_with_the_process() -> None:
    process = made(max_waiting=1)
    await say(process, "before")
    under_way = [asyncio.create_task(process.answer({"sleep": 60}, "job")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="1 jobs are waiting to be done already"):
        await process.answer({"say": "a"}, "job")
    process.close()
    assert all(isinstance(error, RequestFailed) for error in await asyncio.gather(*under_way, return_exceptions=True))
    with pytest.raises(RequestFailed):
        await process.answer({"say": "a"}, "job")


async def test_an_error_that_nobody_waits_for_any_more_is_no_fault_of_the_server(
    process: LimitedProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """The client has gone. Python 3.11 logs a future whose error nobody takes; others log what `shield` is left with."""
    left = asyncio.create_task(process.answer({"refuse": "not today"}, "job"))
    await asyncio.sleep(0)
    left.cancel()
    await say(process, "after")
    del left
    gc.collect()
    assert caplog.messages == []


def _processor_seconds_of_ended_copies(process: LimitedProcess) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
