"""A router that is told to go: what waits in it waits on, and at the end of the drain it is told why it got no server."""

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import grpc
import httpx
import pytest
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpBody, ProcessingRequest
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorStub
from starling_agent.settings import ServerSettings
from starling_router.discovery import BackendsFile, BackendSources
from starling_router.epp import EppSettings
from starling_router.hold_queue import HoldPolicy
from starling_router.picker import RouterPolicy
from starling_router.router import ServiceRouter
from starling_router.run import run_router

from tests.ports import free_port
from tests.router.backends import StubBackend
from tests.router.serving import metric
from tests.router.test_epp_stream import begin
from tests.waiting import until

CHAT = "/v1/chat/completions"
ASKED = {"model": "m"}
PATIENCE = 60.0


def set_ready(backends: Sequence[StubBackend], *, ready: bool) -> None:
    for backend in backends:
        backend.state = backend.state.model_copy(update={"ready": ready})


def given(backends: Sequence[StubBackend]) -> BackendSources:
    return BackendSources(tuple(each.url for each in backends))


@asynccontextmanager
async def router(
    sources: BackendSources, drain_seconds: float, hold: HoldPolicy, picks: EppSettings | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    """Yields a client of a router that obeys signals; it has ended after."""
    settings = ServerSettings(host="127.0.0.1", port=0, access_log=False, accept_seconds=0.0, drain_seconds=drain_seconds)
    port = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(
        run_router(settings, partial(ServiceRouter, settings, RouterPolicy(), hold=hold), sources, port.set_result, picks)
    )
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{await port}", timeout=PATIENCE) as client:
        yield client
    async with asyncio.timeout(PATIENCE):
        await running


async def until_held(client: httpx.AsyncClient) -> None:
    async def is_held() -> bool:
        return await metric(client, "router_held_requests") == 1

    await until(is_held, "a request to wait")


async def held_pick(channel: "grpc.aio.Channel", client: httpx.AsyncClient) -> "grpc.aio.StreamStreamCall":
    """Asks as a gateway for an endpoint. Returns once the request waits."""
    call = ExternalProcessorStub(channel).Process()
    await call.write(begin())
    await call.write(ProcessingRequest(request_body=HttpBody(body=b'{"model": "m"}', end_of_stream=True)))
    await until_held(client)
    return call


async def is_closed(client: httpx.AsyncClient) -> bool:
    """A draining router ends the connection behind each answer, and refuses others once it is closed."""
    try:
        await client.get("/health")
    except httpx.TransportError:
        return True
    return False


async def test_a_held_request_waits_on_for_its_turn(backends: list[StubBackend]) -> None:
    set_ready(backends, ready=False)
    async with router(given(backends), PATIENCE, HoldPolicy()) as client:
        held = asyncio.create_task(client.post(CHAT, json=ASKED))
        await until_held(client)
        signal.raise_signal(signal.SIGTERM)
        await until(lambda: is_closed(client), "the router to close")
        set_ready(backends, ready=True)
        assert (await held).status_code == 200


@pytest.mark.parametrize("first_comment_seconds", [PATIENCE, 0.0])
async def test_a_held_request_is_told_when_the_drain_is_over(backends: list[StubBackend], first_comment_seconds: float) -> None:
    set_ready(backends, ready=False)
    async with router(given(backends), 0.2, HoldPolicy(first_comment_seconds=first_comment_seconds)) as client:
        held = asyncio.create_task(client.post(CHAT, json={**ASKED, "stream": True}))
        await until_held(client)
        signal.raise_signal(signal.SIGTERM)
        answer = await held
        assert answer.status_code == (200 if first_comment_seconds == 0 else 503)
        assert '"code":"shutting_down"' in answer.text and "send the request again" in answer.text


async def test_a_gateways_held_request_waits_on_for_a_backend_that_is_to_come(backends: list[StubBackend], tmp_path: Path) -> None:
    (tmp_path / "backends").touch()
    picks = EppSettings(free_port(), free_port(), secure=False)
    async with (
        router(BackendSources(file=BackendsFile(tmp_path / "backends")), PATIENCE, HoldPolicy(), picks) as client,
        grpc.aio.insecure_channel(f"127.0.0.1:{picks.gateways}") as channel,
    ):
        call = await held_pick(channel, client)

        async def takes_no_more() -> bool:
            try:
                async with grpc.aio.insecure_channel(f"127.0.0.1:{picks.gateways}") as other:
                    refused = ExternalProcessorStub(other).Process()
                    await refused.write(begin(ProcessingMode.BUFFERED))
                    await refused.read()
            except grpc.aio.AioRpcError as error:
                return error.code() == grpc.StatusCode.UNAVAILABLE
            raise AssertionError("that mode is refused")

        signal.raise_signal(signal.SIGTERM)
        await until(takes_no_more, "the picker to end")
        (tmp_path / "backends").write_text(backends[0].url)
        picked = (await call.read()).request_headers.response.header_mutation.set_headers[0].header
        assert picked.raw_value.decode() in backends[0].url
        call.cancel()


async def test_a_gateway_is_told_when_the_drain_is_over(backends: list[StubBackend]) -> None:
    set_ready(backends, ready=False)
    picks = EppSettings(free_port(), free_port(), secure=False)
    async with (
        router(given(backends), 0.2, HoldPolicy(), picks) as client,
        grpc.aio.insecure_channel(f"127.0.0.1:{picks.gateways}") as channel,
    ):
        call = await held_pick(channel, client)
        signal.raise_signal(signal.SIGTERM)
        answer = (await call.read()).immediate_response
        assert answer.status.code == 503 and b'"code":"shutting_down"' in answer.body
