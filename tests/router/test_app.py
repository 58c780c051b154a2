"""The router in front of servers that answer, refuse and go away."""

import asyncio
import json
import socket

import httpx
import pytest
from aiohttp import web
from starling_agent.api_keys import ApiKeys
from starling_agent.file_token import FileToken
from starling_agent.openai.stream_record import RESUMABLE, RESUME_TYPE
from starling_router import upstream
from starling_router.app import MOST_LOST
from starling_router.router import ServiceRouter
from starling_router.upstream import MOST_UNFINISHED

from tests.ports import free_port
from tests.router.backends import Stepwise, StubBackend, drop, echo, refuse, stream
from tests.router.serving import Start, metric
from tests.waiting import until

CHAT = "/v1/chat/completions"


async def test_a_request_arrives_as_it_was_sent(start: Start) -> None:
    client = await start()
    headers = {"X-Mine": "1", "X-Starling-Router": "forged", "Connection": "keep-alive", "X-Request-Id": "abc"}
    answer = await client.post(f"{CHAT}?a=b%20c", headers=headers, json={"messages": "ü"})
    seen = answer.json()
    assert (seen["method"], seen["path"], json.loads(seen["body"])) == ("POST", f"{CHAT}?a=b%20c", {"messages": "ü"})
    assert seen["headers"]["x-mine"] == "1" and seen["headers"]["x-forwarded-for"] == "127.0.0.1"
    assert seen["headers"]["x-request-id"] == answer.headers["x-request-id"] == "abc"
    assert "x-starling-router" not in seen["headers"] and "accept-encoding" not in seen["headers"]
    assert seen["headers"]["host"] != str(client.base_url.netloc)


async def test_a_server_that_says_that_it_has_no_free_kv_blocks_is_taken_last(start: Start, backends: list[StubBackend]) -> None:
    backends[0].state = backends[0].state.model_copy(update={"kv_free": 0})
    client = await start()
    answers = [await client.post(CHAT, headers={"X-Starling-Explain": "1"}, json={"messages": "x"}) for _ in range(3)]
    assert {answer.headers["x-starling-route"] for answer in answers} == {"backend=chat-2-0; cached=0; reason=load"}


async def test_other_methods_and_bodies_of_all_kinds_go_on(start: Start) -> None:
    client = await start()
    assert (await client.delete("/v1/responses/resp_1")).json()["method"] == "DELETE"
    assert (await client.post("/tokenize", content=b"no json")).json()["body"] == "no json"
    assert (await client.get("/v1/models")).json()["body"] == ""


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/backend", 404),
        ("/backend/cache", 404),
        ("//backend//cache/", 404),
        ("/%62ackend/prompting", 404),
        ("/backend/cache#x", 400),
        ("//backend/cache%23x", 404),
        ("//backend/cache%3Fx", 404),
        ("/sleep?mode=abort", 404),
    ],
)
async def test_what_routers_alone_may_ask_is_not_sent_on(
    start: Start, backends: list[StubBackend], target: str, status: int
) -> None:
    client = await start()
    answer = await client.get("/", extensions={"target": target.encode()})
    assert answer.status_code == status and answer.json()["error"]["message"]
    assert not [*backends[0].paths, *backends[1].paths]


async def test_pages_of_allowed_origins_may_call_whoever_answers(start: Start, backends: list[StubBackend]) -> None:
    async def allows(_: web.Request) -> web.StreamResponse:
        return web.json_response({}, headers={"Access-Control-Allow-Origin": "https://a.b", "Vary": "Origin"})

    for backend in backends:
        backend.respond = allows
    client = await start(allowed_origins=("https://a.b",), api_keys=ApiKeys(["k"]))
    origin = {"Origin": "https://a.b"}
    preflight = origin | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    assert (await client.options(CHAT, headers=preflight)).status_code == 200
    for key, status in (("k", 200), ("wrong", 401)):
        answer = await client.post(CHAT, json={}, headers=origin | {"Authorization": f"Bearer {key}"})
        assert answer.status_code == status
        assert answer.headers.get_list("access-control-allow-origin") == ["https://a.b"], "a page takes one alone"


async def test_what_is_encoded_stays_so(start: Start) -> None:
    client = await start()
    answer = await client.get("/", extensions={"target": b"//v1/a%2Fb%23c%3Fd//?q=%2F"})
    assert answer.json()["path"] == "/v1/a%2Fb%23c%3Fd?q=%2F"


async def test_a_clients_resume_record_is_none(start: Start, backends: list[StubBackend]) -> None:
    client = await start()
    headers = {"Content-Type": f"{RESUME_TYPE}; charset=utf-8".upper()}
    answer = await client.post(CHAT, content=b'[]\n{"model": "m"}', headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert not [*backends[0].paths, *backends[1].paths]


async def test_a_refusal_without_an_end_is_none(start: Start, backends: list[StubBackend]) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=429)
        await response.prepare(request)
        while True:
            await response.write(bytes(1 << 16))

    backends[0].respond = endless
    client = await start()
    assert {(await client.post(CHAT, json={})).status_code for _ in range(2)} == {200}
    assert CHAT in backends[0].paths


@pytest.mark.parametrize("refusal", [refuse(503), refuse(429), drop])
async def test_a_refused_request_goes_on_to_another_backend(start: Start, backends: list[StubBackend], refusal: object) -> None:
    backends[0].respond = refusal  # type: ignore[assignment]
    client = await start()
    for _ in range(4):
        assert (await client.post(CHAT, json={})).status_code == 200
    assert CHAT in backends[0].paths
    assert await metric(client, "router_retries_total") >= 1


async def test_the_refusal_of_all_is_the_answer(start: Start, backends: list[StubBackend]) -> None:
    for backend in backends:
        backend.respond = refuse(429)
    client = await start()
    answer = await client.post(CHAT, json={})
    assert (answer.status_code, answer.headers["retry-after"], answer.json()["error"]["message"]) == (429, "7", "refused with 429")
    assert [len(backend.paths) for backend in backends] == [1, 1]


async def test_a_wrong_request_is_asked_once(start: Start, backends: list[StubBackend]) -> None:
    for backend in backends:
        backend.respond = refuse(400)
    client = await start()
    assert (await client.post(CHAT, json={})).status_code == 400
    assert sum(len(backend.paths) for backend in backends) == 1


async def test_without_a_backend_the_answer_says_so(start: Start, backends: list[StubBackend]) -> None:
    for backend in backends:
        backend.state = backend.state.model_copy(update={"ready": False})
    client = await start(ready=0)
    answer = await client.post(CHAT, json={})
    assert (answer.status_code, answer.json()["error"]["code"], answer.headers["retry-after"]) == (503, "no_backend", "5")
    assert (await client.get("/ready")).status_code == 503
    assert (await client.get("/health")).status_code == 200
    backends[1].state = backends[1].state.model_copy(update={"ready": True})

    async def is_ready() -> bool:
        return (await client.get("/ready")).status_code == 200

    await until(is_ready, "the router to be ready")
    assert (await client.post(CHAT, json={})).status_code == 200
    assert not backends[0].paths


async def test_a_stream_arrives_piece_by_piece_and_whole(start: Start, backends: list[StubBackend]) -> None:
    stepwise = Stepwise(20)
    for backend in backends:
        backend.respond = stepwise.respond
    client = await start()
    async with client.stream("POST", CHAT, json={"stream": True}) as answer:
        chunks = await stepwise.chunks(answer)
    assert answer.headers["content-type"] == "text/event-stream"
    assert b"".join(chunks) == b"".join(b"data: %d\n\n" % i for i in range(20))


async def test_a_stream_whose_backend_goes_away_ends_with_an_error(start: Start, backends: list[StubBackend]) -> None:
    for backend in backends:
        backend.respond = stream(3, then=drop)
    client = await start()
    text = (await client.post(CHAT, json={"stream": True})).text
    assert text.startswith("data: 0\n\ndata: 1\n\ndata: 2\n\ndata: {")
    error = json.loads(text.split("data: ")[-1])["error"]
    assert error["code"] == "backend_lost" and "(its connection ended before its answer)" in error["message"]
    assert await metric(client, "router_broken_answers_total") == 1


async def test_another_answer_that_is_cut_does_not_look_whole(start: Start, backends: list[StubBackend]) -> None:
    for backend in backends:
        backend.respond = stream(3, content_type="application/json", then=drop)
    client = await start()
    with pytest.raises(httpx.RemoteProtocolError):
        await client.post(CHAT, json={})


async def test_a_client_that_goes_away_frees_its_backend(start: Start, backends: list[StubBackend]) -> None:
    gone = asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            while True:
                await response.write(b"data: x\n\n")
                await asyncio.sleep(0.01)
        except ConnectionError:
            gone.set()
            raise

    for backend in backends:
        backend.respond = endless
    client = await start()
    async with client.stream("POST", CHAT, json={}) as answer:
        await anext(answer.aiter_raw())
        assert await metric(client, "router_open_requests") == 1

    async def is_free() -> bool:
        return gone.is_set() and not await metric(client, "router_open_requests")

    await until(is_free, "the backend to be free")


async def test_prefixes_of_text_stay_together_and_the_reason_is_told(start: Start) -> None:
    client = await start()
    lines = (await client.get("/metrics")).text.splitlines()
    weights = [line for line in lines if line.startswith("starling:router_policy_weight{")]
    assert weights == [
        f'starling:router_policy_weight{{reason="{reason}"}} {weight}'
        for reason, weight in (("prefix", 2.0), ("load", 1.0), ("session", 1.0))
    ]
    explain = {"X-Starling-Explain": "1"}
    seen = set()
    for i in range(4):
        body = {"messages": [{"role": "user", "content": "shared " * 400}, {"role": "user", "content": str(i)}]}
        answer = await client.post(CHAT, json=body, headers=explain)
        backend, cached, reason = answer.headers["x-starling-route"].split("; ")
        seen.add(backend)
        assert reason == ("reason=prefix" if i else "reason=load") and cached.startswith("cached=7" if i else "cached=0")
    assert len(seen) == 1
    assert "x-starling-route" not in (await client.post(CHAT, json={})).headers


async def test_a_stored_response_is_asked_where_it_is(start: Start, backends: list[StubBackend]) -> None:
    client = await start()
    name = "resp_chat-2-0_" + "0" * 32
    for _ in range(3):
        await client.get(f"/v1/responses/{name}")
        await client.post("/v1/responses", json={"previous_response_id": name})
    assert not backends[0].paths and len(backends[1].paths) == 6


async def test_a_response_that_names_nobody_is_looked_for_everywhere(start: Start, backends: list[StubBackend]) -> None:
    backends[0].respond = refuse(404)
    client = await start()
    for _ in range(3):
        assert (await client.get("/v1/responses/resp_" + "0" * 32)).status_code == 200
    backends[1].respond = refuse(404)
    assert (await client.get("/v1/responses/resp_" + "0" * 32)).status_code == 404


async def test_keys_and_limits_are_checked_here(start: Start, backends: list[StubBackend]) -> None:
    client = await start(api_keys=ApiKeys(["secret"]), max_body_bytes=100)
    assert (await client.post(CHAT, json={})).status_code == 401
    key = {"Authorization": "Bearer secret"}
    assert (await client.post(CHAT, content=b"x" * 200, headers=key)).status_code == 413
    assert not any(backend.paths for backend in backends)
    answer = await client.post(CHAT, json={}, headers=key)
    assert answer.json()["headers"]["authorization"] == "Bearer secret"


@pytest.mark.parametrize("target", ["@127.0.0.1:1/x", "http://127.0.0.1:1/x", "*", "x"])
async def test_a_target_that_is_no_path_leads_nowhere(start: Start, backends: list[StubBackend], target: str) -> None:
    """Behind a backend's address it would be another host."""
    client = await start()
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    writer.write(f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}".encode())
    assert b" 400 " in await reader.readline()
    writer.close()
    assert await metric(client, "router_ready") == 2 and not any(backend.paths for backend in backends)


async def test_clients_share_no_cookies_and_headers_stay_as_they_are(start: Start, backends: list[StubBackend]) -> None:
    async def give_cookie(request: web.Request) -> web.StreamResponse:
        answer = await echo(request)
        answer.headers["Set-Cookie"] = "mine=1; Path=/"
        return answer

    for backend in backends:
        backend.url = backend.url.replace("127.0.0.1", "localhost")  # addresses get no cookies in any case
        backend.respond = give_cookie
    client = await start()
    answer = await client.post(CHAT, json={}, headers={"X-Name": "Zürich".encode()})
    assert answer.json()["headers"]["x-name"] == "Zürich" and "set-cookie" in answer.headers
    for _ in backends:
        client.cookies.clear()
        assert "cookie" not in (await client.post(CHAT, json={})).json()["headers"]
    answer = await client.post(CHAT, json={}, headers={"X-Name": b"\xff"})
    assert answer.status_code == 400 and await metric(client, "router_ready") == 2


async def test_a_response_that_is_named_in_no_text_is_the_servers_to_refuse(start: Start, backends: list[StubBackend]) -> None:
    for backend in backends:
        backend.respond = refuse(400)
    client = await start()
    body = b'{"previous_response_id": "\xff"}'
    assert (await client.post("/v1/responses", content=body)).status_code == 400
    assert sum(len(backend.paths) for backend in backends) == 1


async def test_a_request_that_ends_servers_does_not_end_them_all(start: Start, backends: list[StubBackend]) -> None:
    more = [StubBackend(f"chat-{i}-0") for i in range(3, 6)]
    for backend in more:
        await backend.start()
    backends += more
    for backend in backends:
        backend.respond = drop
    client = await start(ready=5)
    answer = await client.post(CHAT, json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "backend_lost")
    assert sum(bool(backend.paths) for backend in backends) == MOST_LOST


async def test_an_error_follows_whole_events(start: Start, backends: list[StubBackend]) -> None:
    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: 1\n\ndata: {"half')
        await asyncio.sleep(0.05)
        return await drop(request)

    for backend in backends:
        backend.respond = half
    client = await start()
    text = (await client.post(CHAT, json={"stream": True})).text
    assert text.startswith('data: 1\n\ndata: {"error"')


@pytest.mark.parametrize("noted", [False, True])
async def test_an_event_without_an_end_is_not_kept(
    start: Start, backends: list[StubBackend], token: FileToken, noted: bool
) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **({RESUMABLE: "yes"} if noted else {})})
        await response.prepare(request)
        await response.write(b"data: 1\n\n" + (b": note {}\n\n" if noted else b""))
        while True:
            await response.write(b"x" * (MOST_UNFINISHED // 8))

    for backend in backends:
        backend.respond = endless
    client = await start(**({"router_token": token} if noted else {}))
    text = (await client.post(CHAT, json={"model": "m", "stream": True})).text
    assert text.startswith('data: 1\n\ndata: {"error"') and "has not ended after 64 MiB" in text and '"bad_answer"' in text
    assert [path for backend in backends for path in backend.paths] == [CHAT], "another server's answer would be the same"
    assert await metric(client, "router_broken_answers_total") == 1


async def test_counts_of_a_backend_that_went_are_told_no_more(
    start: Start, backends: list[StubBackend], routers: list[ServiceRouter]
) -> None:
    client = await start()
    for _ in range(2):
        assert (await client.post(CHAT, json={"model": "m"})).status_code == 200
    assert await metric(client, "router_picks_total") == 2
    routers[0].set_backends({backends[0].name: backends[0].url})
    shown = (await client.get("/metrics")).text
    assert f'picks_total{{backend="{backends[0].name}"' in shown and backends[1].name not in shown


async def test_a_backend_that_takes_no_connection_had_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that vanished drops what comes, as a full backlog does. Another backend may be asked."""
    monkeypatch.setattr(upstream, "CONNECT_SECONDS", 0.3)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        asked = upstream.Upstream()
        with pytest.raises(upstream.BackendUnreachable) as caught:
            async with asked.send("GET", f"http://127.0.0.1:{full.getsockname()[1]}/", [], b""):
                raise AssertionError
        assert not caught.value.had_it and str(caught.value) == "it takes no connection: nothing in 0.3 s"
        await asked.close()
        for each in waiting:
            each.close()


async def test_a_refused_connection_is_told_in_words() -> None:
    asked = upstream.Upstream()
    with pytest.raises(upstream.BackendUnreachable, match=r"^it takes no connection: Connection refused$") as caught:
        async with asked.send("GET", f"http://127.0.0.1:{free_port()}/", [], b""):
            raise AssertionError
    assert not caught.value.had_it
    await asked.close()


@pytest.mark.parametrize("answers", [True, False])
async def test_a_connection_that_ends_while_it_is_idle_is_no_failure_of_its_server(answers: bool) -> None:
    """Its second request meets the end of the connection. A new one shows what the server is like."""
    asked = list[str]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = f"connection {len(asked)}"
        while line := await reader.readline():
            if line == b"\r\n":
                asked.append(connection)
                if (asked.count(connection) == 2) or (len(asked) > 2 and not answers):
                    break
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    to = upstream.Upstream()
    try:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        async with to.send("POST", url, [], b"") as answer:
            assert b"".join([chunk async for chunk in answer.chunks]) == b"ok"
        if answers:
            async with to.send("POST", url, [], b"") as answer:
                assert answer.status == 200
        else:
            with pytest.raises(upstream.BackendUnreachable) as caught:
                async with to.send("POST", url, [], b""):
                    raise AssertionError
            assert caught.value.had_it
        assert asked == ["connection 0", "connection 0", "connection 2"]
    finally:
        await to.close()
        server.close()


async def test_headers_of_one_connection_end_with_it(start: Start, backends: list[StubBackend]) -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        seen = {name.lower() for name in request.headers} & {"x-hop", "x-other", "x-mine"}
        return web.Response(text=" ".join(seen), headers={"Connection": "X-Of-One, keep-alive", "X-Of-One": "1", "X-Of-All": "1"})

    for backend in backends:
        backend.respond = respond
    client = await start()
    answer = await client.get("/v1/models", headers={"Connection": "X-Hop, x-other", "X-Hop": "1", "X-Other": "1", "X-Mine": "1"})
    assert answer.text == "x-mine" and "x-of-one" not in answer.headers and answer.headers["x-of-all"] == "1"
