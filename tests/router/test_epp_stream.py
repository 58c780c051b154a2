"""The endpoint picker's messages, as a gateway exchanges them with it."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, Metadata
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProtocolConfiguration,
)
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorStub
from google.protobuf.struct_pb2 import Struct
from grpc_health.v1 import health_pb2, health_pb2_grpc
from starling_agent.settings import ServerSettings
from starling_engine.errors import ConfigError
from starling_router.epp import EppSettings
from starling_router.epp import server as epp_server
from starling_router.epp.messages import MOST_CHUNK_BYTES, chunks, subset_of
from starling_router.epp.pick_app import endpoint_of
from starling_router.epp.server import EXT_PROC, EppServer
from starling_router.picker import RouterPolicy
from starling_router.router import ServiceRouter

from tests.router.backends import StubBackend
from tests.router.serving import metric, serving
from tests.waiting import until

FULL, NONE = ProcessingMode.FULL_DUPLEX_STREAMED, ProcessingMode.NONE


@pytest.mark.parametrize("size", [0, 1, MOST_CHUNK_BYTES, MOST_CHUNK_BYTES + 1, 3 * MOST_CHUNK_BYTES, 500_000])
def test_chunks_are_the_body_and_the_last_one_says_so(size: int) -> None:
    body = bytes(each % 251 for each in range(size))
    made = [*chunks(body)]
    assert b"".join(piece for piece, _ in made) == body
    assert all(len(piece) <= 62_000 for piece, _ in made)
    assert [is_last for _, is_last in made] == [False] * (len(made) - 1) + [True]
    assert len(made) == max(1, -(-size // MOST_CHUNK_BYTES))


def test_a_subset_is_none_empty_or_a_list() -> None:
    def message(given: object) -> ProcessingRequest:
        hint = Struct()
        hint.update({} if given is None else {"x-gateway-destination-endpoint-subset": given})
        return ProcessingRequest(metadata_context=Metadata(filter_metadata={"envoy.lb.subset_hint": hint}))

    assert subset_of(ProcessingRequest()) is None and subset_of(message(None)) is None
    assert subset_of(message([])) == subset_of(message("")) == frozenset()
    assert (
        subset_of(message(["10.0.0.1:80", "[::1]:80"]))
        == subset_of(message("10.0.0.1:80, [::1]:80"))
        == {"10.0.0.1:80", "[::1]:80"}
    )


def test_a_gateway_knows_endpoints_by_address() -> None:
    urls = ("http://10.0.0.1:8000", "http://10.0.0.1", "https://10.0.0.1", "http://[2001:DB8:0::1]:8000")
    assert [*map(endpoint_of, urls)] == ["10.0.0.1:8000", "10.0.0.1:80", "10.0.0.1:443", "[2001:db8::1]:8000"]
    for url, why in (("http://chat-1-0:8000", "ADDRESS"), ("http://10.0.0.1:8000/a", "path")):
        with pytest.raises(ConfigError, match=why):
            endpoint_of(url)


@dataclass
class Picking:
    """A picker, a channel to it, its ports, and a client of the router that it is a part of."""

    server: EppServer
    channel: "grpc.aio.Channel"
    ports: EppSettings
    direct: Any


@pytest.fixture
async def picking(backends: list[StubBackend]) -> AsyncIterator[Picking]:
    router = ServiceRouter(ServerSettings(access_log=False), RouterPolicy())
    async with serving(router, {each.name: each.url for each in backends}, 2) as direct:
        server = router.endpoint_picker()
        ports = await server.start("127.0.0.1", EppSettings(0, 0, secure=False))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports.gateways}") as channel:
            yield Picking(server, channel, ports, direct)
        await server.close(0, asyncio.Event())


def headers(*, end: bool = False, **given: str) -> HttpHeaders:
    listed = [HeaderValue(key=name, raw_value=value.encode()) for name, value in given.items()]
    return HttpHeaders(headers=HeaderMap(headers=listed), end_of_stream=end)


def begin(request_mode: int = FULL, response_mode: int = FULL) -> ProcessingRequest:
    modes = ProtocolConfiguration(request_body_mode=request_mode, response_body_mode=response_mode)
    first = headers(**{":path": "/v1/chat/completions", ":method": "POST", ":authority": "a"})
    return ProcessingRequest(request_headers=first, protocol_config=modes)


async def test_trailers_end_bodies_and_an_end_that_comes_twice_is_one(picking: Picking) -> None:
    call = ExternalProcessorStub(picking.channel).Process()
    await call.write(begin())
    await call.write(ProcessingRequest(request_body=HttpBody(body=b"x" * 70_000)))
    await call.write(ProcessingRequest(request_trailers=HttpTrailers()))
    first = await call.read()
    picked = first.request_headers.response.header_mutation.set_headers[0].header
    assert picked.key == "x-gateway-destination-endpoint"
    assert first.dynamic_metadata["envoy.lb"][picked.key] == picked.raw_value.decode()
    pieces = [(await call.read()).request_body.response.body_mutation.streamed_response for _ in range(2)]
    assert [(len(piece.body), piece.end_of_stream) for piece in pieces] == [(62_000, False), (8_000, False)]
    assert (await call.read()).HasField("request_trailers")
    await call.write(ProcessingRequest(request_body=HttpBody(end_of_stream=True)))
    await call.write(ProcessingRequest(response_headers=headers(**{":status": "200", "x-starling-note": "1", "x-mine": "1"})))
    assert (await call.read()).response_headers.response.header_mutation.remove_headers == ["x-starling-note"]
    await call.write(ProcessingRequest(response_body=HttpBody(body=b"y")))
    piece = (await call.read()).response_body.response.body_mutation.streamed_response
    assert (piece.body, piece.end_of_stream) == (b"y", False)
    assert await metric(picking.direct, "router_open_requests") == 1
    await call.write(ProcessingRequest(response_trailers=HttpTrailers()))
    assert (await call.read()).HasField("response_trailers")
    assert await call.read() is grpc.aio.EOF
    assert await metric(picking.direct, "router_open_requests") == 0


@pytest.mark.parametrize("ends", ["cancelled", "half closed"])
async def test_a_call_that_ends_frees_its_endpoint(picking: Picking, ends: str) -> None:
    call = ExternalProcessorStub(picking.channel).Process()
    await call.write(begin(response_mode=NONE))
    await call.write(ProcessingRequest(request_body=HttpBody(body=b"{}", end_of_stream=True)))
    await call.read()
    assert await metric(picking.direct, "router_open_requests") == 1
    if ends == "cancelled":
        call.cancel()
    else:
        await call.done_writing()

    async def none_is_open() -> bool:
        return await metric(picking.direct, "router_open_requests") == 0

    await until(none_is_open, "the request to end", 20)
    assert await metric(picking.direct, "router_pending_tokens") == 0


async def test_a_gateway_that_tells_no_modes_has_the_right_ones(picking: Picking) -> None:
    call = ExternalProcessorStub(picking.channel).Process()
    await call.write(ProcessingRequest(request_headers=begin().request_headers))
    await call.write(ProcessingRequest(request_body=HttpBody(body=b"{}", end_of_stream=True)))
    assert (await call.read()).HasField("request_headers")
    call.cancel()


async def test_a_gateway_whose_machine_vanished_is_noticed(backends: list[StubBackend], monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay stands for the network: it falls silent, and closes nothing."""
    soon = [(name, 300 if name.endswith("_ms") else value) for name, value in epp_server._OPTIONS]
    monkeypatch.setattr(epp_server, "_OPTIONS", soon)
    router, is_there = ServiceRouter(ServerSettings(access_log=False), RouterPolicy()), asyncio.Event()
    is_there.set()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await is_there.wait()
            writer.write(data)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", ports.gateways)
        try:
            await asyncio.gather(pass_on(reader, to_writer), pass_on(to_reader, writer))
        except OSError:
            pass
        finally:
            for each in (writer, to_writer):
                each.close()

    async with serving(router, {each.name: each.url for each in backends}, 2) as direct:
        server = router.endpoint_picker()
        ports = await server.start("127.0.0.1", EppSettings(0, 0, secure=False))
        network = await asyncio.start_server(relay, "127.0.0.1", 0)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{network.sockets[0].getsockname()[1]}") as channel:
            call = ExternalProcessorStub(channel).Process()
            await call.write(begin())
            await call.write(ProcessingRequest(request_body=HttpBody(body=b"{}", end_of_stream=True)))
            assert (await call.read()).HasField("request_headers")
            assert await metric(direct, "router_open_requests") == 1
            is_there.clear()

            async def none_is_open() -> bool:
                return await metric(direct, "router_open_requests") == 0

            await until(none_is_open, "the request to end", 20)
            is_there.set()
        network.close()
        await server.close(0, asyncio.Event())


@pytest.mark.parametrize("modes", [(ProcessingMode.BUFFERED, FULL), (FULL, ProcessingMode.STREAMED)])
async def test_other_processing_modes_are_refused(picking: Picking, modes: tuple[int, int]) -> None:
    call = ExternalProcessorStub(picking.channel).Process()
    await call.write(begin(*modes))
    with pytest.raises(grpc.aio.AioRpcError, match="has to be FULL_DUPLEX_STREAMED") as caught:
        await call.read()
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_a_port_that_is_taken_is_named(picking: Picking) -> None:
    with pytest.raises(ConfigError, match="cannot be listened on") as caught:
        await EppServer(picking.server).start("127.0.0.1", EppSettings(picking.ports.gateways, 0))
    assert caught.value.field == "epp_port"


async def test_probes_say_how_it_is(picking: Picking) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{picking.ports.health}") as channel:
        probe = health_pb2_grpc.HealthStub(channel)

        async def states() -> list[int]:
            requests = [health_pb2.HealthCheckRequest(service=name) for name in ("liveness", "readiness", EXT_PROC)]
            return [(await probe.Check(request)).status for request in requests]

        assert await states() == [1, 2, 2], "no endpoint is known yet"
        await picking.server.begin_ready()
        assert await states() == [1, 1, 1]
        picking.server.end_ready()

        async def is_unready() -> bool:
            return await states() == [1, 2, 2]

        await until(is_unready, "the picker to say that it ends", 20)
        await picking.server.begin_ready()
        assert await is_unready(), "what ends stays so"
