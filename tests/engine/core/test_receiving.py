"""Messages from frontends: an id that comes again, and more messages than a step should wait for."""

import asyncio
import time
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from starling_engine.core import process
from starling_engine.core.client import CoreClient
from starling_engine.core.messages import Add, FromCore, Loading, Ping, Pong, ShutdownCore
from starling_engine.delta import Delta
from starling_engine.params import SamplingParams
from starling_engine.request import EngineRequest

from tests.engine.held_executor import HeldExecutor, core_process

encode = msgspec.msgpack.Encoder().encode


def request(prompt: list[int], tokens: int = 5) -> EngineRequest:
    return EngineRequest(id="x", prompt_ids=prompt, params=SamplingParams(max_tokens=tokens, ignore_eos=True))


async def ended(deltas: asyncio.Queue[Delta]) -> list[int]:
    """The tokens of a request, to its end."""
    tokens: list[int] = []
    while True:
        delta = await asyncio.wait_for(deltas.get(), 20)
        assert delta.error is None
        tokens += delta.tokens
        if delta.finish_reason is not None:
            return tokens


async def test_an_id_that_comes_again_gets_no_token_of_the_one_that_was_closed(tmp_path: Path) -> None:
    executor = HeldExecutor()
    async with core_process(tmp_path, executor) as (client, _):
        old: asyncio.Queue[Delta] = asyncio.Queue()
        new: asyncio.Queue[Delta] = asyncio.Queue()
        await client.add(request([1, 1]), old.put_nowait)
        assert await asyncio.to_thread(executor.submitted.wait, 20)
        client.abort(["x"])  # while its step runs
        await client.add(request([2, 2]), new.put_nowait)
        executor.released.set()
        assert await ended(new) == [2] * 5
        assert old.empty()


async def test_steps_go_on_however_many_messages_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An end that was ordered behind very many messages comes after a stream that began before them. Nobody thinks it dead."""
    monkeypatch.setattr(process, "ALIVE_SECONDS", 0.0)
    executor = HeldExecutor()
    async with core_process(tmp_path, executor) as (client, address):
        deltas: asyncio.Queue[Delta] = asyncio.Queue()
        await client.add(request([1]), deltas.put_nowait)
        assert await asyncio.to_thread(executor.submitted.wait, 20)
        with zmq.Context() as context, context.socket(zmq.DEALER) as flood:
            flood.setsockopt(zmq.SNDHWM, 0)
            flood.setsockopt(zmq.LINGER, 0)
            flood.connect(address)
            flood.send(encode(Ping()))
            for _ in range(5000):
                flood.send(encode(Add.of(request([]))))  # is refused
            flood.send(encode(ShutdownCore()))
            executor.released.set()
            assert await ended(deltas) == [1] * 5
            flood.setsockopt(zmq.RCVTIMEO, 20_000)
            pongs = 0
            while pongs < 2:  # one answers its only ping
                pongs += isinstance(msgspec.msgpack.decode(flood.recv(), type=FromCore), Pong)


async def test_a_core_that_was_stopped_with_its_frontend_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A suspended machine stops both, and the core may be the first to go on."""
    monkeypatch.setattr(process, "FRONTEND_TIMEOUT", 0.6)
    executor = HeldExecutor()
    async with core_process(tmp_path, executor) as (client, _):
        deltas: asyncio.Queue[Delta] = asyncio.Queue()
        await client.add(request([1]), deltas.put_nowait)
        assert await asyncio.to_thread(executor.submitted.wait, 20)
        time.sleep(1.2)  # noqa: ASYNC251 - the frontend stands still, and the core waits for its step
        executor.released.set()
        time.sleep(0.2)  # noqa: ASYNC251
        assert await ended(deltas) == [1] * 5


async def test_a_core_that_was_busy_while_it_loaded_is_heard_as_soon_as_it_answers(tmp_path: Path) -> None:
    """Its answers to all pings come at once then, and the next one may be that it is ready."""
    address, phases = f"ipc://{tmp_path}/core", []
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as core:
        core.bind(address)
        client = CoreClient(context, address, 20.0)
        connecting = asyncio.create_task(client.connect(phases.append))
        pings = [await core.recv_multipart() for _ in range(20)]
        for number, (identity, _) in enumerate(pings):
            await core.send_multipart((identity, encode(Loading(f"phase {number}"))))
        for _ in range(5):
            await core.recv_multipart()
        assert len(phases) == 20
        connecting.cancel()
        await client.close()
