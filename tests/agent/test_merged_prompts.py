"""The merged streams of several prompts in one answer."""

import asyncio
from contextlib import aclosing

import pytest
from starling_agent.openai.generation import merged
from starling_engine.errors import RequestFailed
from starling_engine.outputs import OutputDelta, StreamDelta


class FakeStream:
    """A stream of `count` deltas; `closed` is set when it is closed."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.closed = False
        self._count = count
        self._error = error

    async def stream(self):
        try:
            for i in range(self._count):
                await asyncio.sleep(0)
                yield StreamDelta("r", [1], [OutputDelta(0, text=str(i))])
            if self._error is not None:
                raise self._error
        finally:
            self.closed = True


async def texts(stream) -> list[tuple[int, str]]:
    async with aclosing(stream):
        return [(prompt, delta.outputs[0].text) async for prompt, delta in stream]


@pytest.mark.parametrize("counts", [[3], [3, 1, 2], [0, 2]])
async def test_all_deltas_come_in_the_order_of_their_prompt(counts):
    got = await texts(merged([FakeStream(count).stream() for count in counts], {}))
    for prompt, count in enumerate(counts):
        assert [text for other, text in got if other == prompt] == [str(i) for i in range(count)]


async def test_one_error_ends_all_streams():
    sources = [FakeStream(1000), FakeStream(2, RequestFailed("broken")), FakeStream(1000)]
    with pytest.raises(RequestFailed, match="broken"):
        await texts(merged([source.stream() for source in sources], {}))
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("number", [1, 3])
async def test_a_reader_that_stops_early_closes_all_streams(number):
    sources = [FakeStream(1000) for _ in range(number)]
    async with aclosing(merged([source.stream() for source in sources], {})) as stream:
        await anext(stream)
    assert all(source.closed for source in sources)
