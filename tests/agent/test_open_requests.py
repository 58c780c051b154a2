"""Open requests that are cancelled: the client disconnected, or the server must end."""

import asyncio

import pytest
from starling_agent.http.errors import ShuttingDown
from starling_agent.http.open_requests import ClientGone, OpenRequests


class FakeClient:
    """Sends its disconnect once `gone` is set."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def forever(log):
    log.append("begun")
    try:
        await asyncio.sleep(60)
    finally:
        log.append("cleaned up")


async def wait_until_begun(log, count=1):
    while log.count("begun") < count:  # noqa: ASYNC110 - turns of the loop are all it takes
        await asyncio.sleep(0)


async def test_work_returns_its_result():
    async def four() -> int:
        return 4

    assert await OpenRequests().run(FakeClient().receive, four()) == 4


async def test_work_raises_its_error():
    async def fails() -> None:
        raise ValueError("no")

    work = OpenRequests()
    with pytest.raises(ValueError, match="no"):
        await work.run(FakeClient().receive, fails())
    assert len(work) == 0


async def test_a_disconnect_cancels_the_work():
    log, client, work = [], FakeClient(), OpenRequests()
    running = asyncio.create_task(work.run(client.receive, forever(log)))
    await wait_until_begun(log)
    assert len(work) == 1
    client.gone.set()
    with pytest.raises(ClientGone):
        await running
    assert log == ["begun", "cleaned up"]
    assert len(work) == 0


async def test_the_end_of_the_server_cancels_all_work():
    log, work = [], OpenRequests()
    running = [asyncio.create_task(work.run(FakeClient().receive, forever(log))) for _ in range(3)]
    await wait_until_begun(log, 3)
    work.end_all("closing")
    for task in running:
        with pytest.raises(ShuttingDown, match="closing"):
            await task
    assert log == ["begun"] * 3 + ["cleaned up"] * 3
    with pytest.raises(ShuttingDown):
        await work.run(FakeClient().receive, forever(log))


async def test_a_cancelled_handler_cancels_its_work():
    log, work = [], OpenRequests()
    running = asyncio.create_task(work.run(FakeClient().receive, forever(log)))
    await wait_until_begun(log)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert log == ["begun", "cleaned up"]
