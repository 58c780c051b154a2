"""Tenants: their file, their keys, their quotas, and what servers are told of them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import msgspec
import pytest
from aiohttp import web
from starling_agent.file_token import FileToken
from starling_agent.openai.anthropic.answers import Message
from starling_agent.openai.protocol.answers import ChatCompletion, Completion, NumberedAnswers, Ranking
from starling_agent.settings import ServerSettings
from starling_engine.errors import ConfigError
from starling_router.accounts import Account, Accounts
from starling_router.answer_usage import AnswerUsage
from starling_router.backend import Backends
from starling_router.hold_queue import HoldPolicy
from starling_router.metrics import RouterMetrics
from starling_router.picker import RouterPolicy
from starling_router.quota import Quota, QuotaExceeded, duration
from starling_router.router import ServiceRouter
from starling_router.tenants import NO_TENANTS, Tenancy, Tenant, TenantKeys, read_tenants
from starling_router.upstream import RawHeaders

from tests.router.backends import StubBackend
from tests.router.serving import metric, serving
from tests.waiting import until

CHAT = "/v1/chat/completions"
TENANTS = "[{name: chat, priority: 2, weight: 3}, {name: batch, tokensPerMinute: 1000, concurrent: 1}]"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Has a file of two tenants, and a key for each."""
    (tmp_path / "tenants.yaml").write_text(TENANTS)
    (tmp_path / "token").write_text("the token")
    (tmp_path / "keys").mkdir()
    for name in ("chat", "batch"):
        (tmp_path / "keys" / name).write_text(f"# of {name}\n{name}-key\n")
    return tmp_path


def test_a_file_of_tenants(folder: Path) -> None:
    assert read_tenants(folder / "tenants.yaml") == [
        Tenant("chat", priority=2, weight=3.0, keys="chat"),
        Tenant("batch", tokens_per_minute=1000, concurrent=1, keys="batch"),
    ]


@pytest.mark.parametrize(("routers", "said"), [(1, False), (2, True)])
def test_fewer_requests_at_once_than_routers_are_said(
    folder: Path, routers: int, said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    Tenancy.read(folder / "tenants.yaml", None, routers)
    out = capsys.readouterr().out
    assert ("may have more than `concurrent`" in out and "batch" in out) is said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "cannot be read"),
        ("{}", "must be a list"),
        ("[1]", r"\[0\] must have fields"),
        ("[{name: A}]", r"\[0\].name must be of a-z"),
        ("[{name: a, key: b}]", r"\[0\].key is unknown; there are name, priority, weight"),
        ("[{name: a}, {name: b, weight: 0}]", r"\[1\].weight must be a number in \[0.001, 1000\], got 0"),
        ("[{name: a, seesAll: 1}]", r"\[0\].seesAll must be true or false, got 1"),
        ("[{name: a, concurrent: true}]", r"\[0\].concurrent must be a whole number"),
        ("[{name: a, tokensPerMinute: 1.5}]", r"\[0\].tokensPerMinute must be a whole number"),
        ("[{name: a, keys: ../b}]", r"\[0\].keys must be the name of a file"),
        ("[{name: a}, {name: a}]", "two tenants have the name 'a'"),
    ],
)
def test_a_wrong_file_is_named_with_the_field(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        read_tenants(file)
    assert str(file) in str(error.value)


def write(file: Path, text: str) -> None:
    """Replaces a file as a kubelet does: by another one."""
    (new := file.with_name("new")).write_text(text)
    new.replace(file)


def test_keys_follow_their_files(folder: Path) -> None:
    chat, batch = tenants = read_tenants(folder / "tenants.yaml")
    keys = TenantKeys(tenants, folder / "keys")
    assert [keys.owner(key) for key in (b"chat-key", b"batch-key", b"other")] == [chat, batch, None]
    write(folder / "keys" / "chat", "new-key\n")
    assert [keys.owner(key) for key in (b"chat-key", b"new-key")] == [None, chat]
    write(folder / "keys" / "chat", "next-key\n")
    write(folder / "keys" / "batch", "new-key\n")
    assert keys.owner(b"new-key") == batch, "the key went from one tenant to the other"
    (folder / "keys" / "batch").unlink()
    assert keys.owner(b"new-key") is None


def test_a_key_of_two_tenants_is_refused_at_the_start(folder: Path) -> None:
    (folder / "keys" / "batch").write_text("chat-key")
    with pytest.raises(ConfigError, match="the key in line 1 is tenant chat's, too"):
        Tenancy.read(folder / "tenants.yaml", None, 1)


def test_a_tenant_without_keys_keeps_no_router_from_starting_unless_all_are(folder: Path) -> None:
    """All keys of a tenant may have been revoked before a router is started again."""
    (folder / "keys" / "batch").unlink()
    chat, batch = tenants = read_tenants(folder / "tenants.yaml")
    keys = TenantKeys(tenants, folder / "keys")
    assert [keys.owner(key) for key in (b"chat-key", b"batch-key")] == [chat, None]
    write(folder / "keys" / "batch", "batch-key")
    assert keys.owner(b"batch-key") == batch
    for name in ("chat", "batch"):
        write(folder / "keys" / name, "# none\n")
    with pytest.raises(ConfigError, match=r"the keys of tenant chat: .* has none"):
        TenantKeys(tenants, folder / "keys")


def test_a_quota_of_tokens() -> None:
    now = 0.0
    quota = Quota(Tenant("a", tokens_per_minute=1200), 2, lambda: now)
    with quota.request(500):
        quota.take(200)  # output that was not known before: 100 are owed
    assert quota.headers() == {
        "x-ratelimit-limit-tokens": "600", "x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "1m10s",
    }  # fmt: skip
    with pytest.raises(QuotaExceeded) as error, quota.request(50):
        pass
    assert (error.value.status, error.value.detail.code, error.value.headers["Retry-After"]) == (429, "rate_limit_exceeded", "15")
    now = 15.0
    with quota.request(50):
        pass
    with pytest.raises(QuotaExceeded, match="may have 600 a minute"), quota.request(601):
        pass


def test_times_are_written_as_openai_does() -> None:
    assert [duration(seconds) for seconds in (0.1195, 1.5, 360)] == ["120ms", "1.5s", "6m0s"]


FREE = '"usage":{"input_tokens":0,"output_tokens":0}'
CREATED = f'event: response.created\ndata: {{"type":"response.created","response":{{"metadata":{{{FREE}}},"usage":null}}}}\n\n'
MESSAGE = 'event: message_start\ndata: {"message":{"usage":{"input_tokens":3,"output_tokens":0,"cache_read_input_tokens":4}}}\n\n'
PING = 'event: ping\ndata: {"type":"ping"}\n\n'
ENDED = (
    'event: message_delta\ndata: {"usage":{"input_tokens":3,"output_tokens":9,"cache_read_input_tokens":4,"inference":null}}\n\n'
    'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)


@pytest.mark.parametrize("size", [1, 5, 1 << 20])
@pytest.mark.parametrize(
    ("streams", "answer", "seen"),
    [
        (False, '{"text":"\\"usage\\":{\\"prompt_tokens\\":9}","usage":{"prompt_tokens":7,"completion_tokens":3}}', (7, 3, 0)),
        (False, '{"usage": {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2}}}\n', (7, 0, 2)),
        (False, '{"usage":{"input_tokens":3,"output_tokens":9,"cache_read_input_tokens":4}}', (7, 9, 4)),
        (False, f'{{"metadata":{{{FREE}}},"usage":null}}', (None, 0, 0)),
        (False, f'{{"metadata":{{{FREE.replace("0", "-1")}}}}}', (None, 0, 0)),
        (True, 'data: {"a":1}\n\ndata: {"a":2}\n\ndata: [DONE]\n\n', (None, 2, 0)),
        (True, 'data: {"a":1}\n\ndata: {"usage":{"input_tokens":5,"output_tokens":40}}\n\n', (5, 40, 0)),
        (True, 'data: {"usage":{"prompt_tokens":5,"completion_tokens":40}}\n\ndata: [DONE]\n\n', (5, 40, 0)),
        (True, CREATED, (None, 1, 0)),
        (True, CREATED.partition(FREE)[0] + FREE + "}}", (None, 1, 0)),
        (True, MESSAGE + PING, (None, 2, 0)),
        (True, MESSAGE + PING + ENDED, (7, 9, 4)),
    ],
)
def test_tokens_are_counted_by_usage_or_events(streams: bool, answer: str, seen: tuple[int | None, int, int], size: int) -> None:
    """However it is cut; what clients write into their answers, and what a stream says at its beginning, is no usage."""
    usage = AnswerUsage(streams=streams)
    for at in range(0, len(answer), size):
        usage.take(answer[at : at + size].encode())
    usage.end(whole=True)
    assert (usage.prompt, usage.output, usage.cached) == seen


@pytest.mark.parametrize("answer", [ChatCompletion, Completion, NumberedAnswers, Ranking, Message])
def test_agents_write_the_usage_last(answer: type[msgspec.Struct]) -> None:
    """What a request asks for in addition, as its prompt's tokens, would push it out of sight."""
    assert answer.__struct_fields__[-1] == "usage"


def test_the_end_of_what_was_cut_is_no_usage() -> None:
    usage = AnswerUsage(streams=False)
    usage.take(b'{"tools":[{%s}' % FREE.encode())
    usage.end(whole=False)
    assert usage.prompt is None


def test_a_stream_whose_events_show_little_is_counted_by_its_notes() -> None:
    """Events leave out reasoning that a client does not want, and one of them may have several tokens."""
    account = Account(Tenant("a", tokens_per_minute=1000), Quota(Tenant("a", tokens_per_minute=1000), 1, lambda: 0.0), None)
    events = [(b"content-type", b"text/event-stream")]
    for ended, counted in ((b"", 30), (b'data: {"usage":{"prompt_tokens":4,"completion_tokens":33}}\n\n', 33)):
        before = account.output
        with account.request({"path": CHAT}, 10, account.share) as bill:
            bill.sent(10)
            bill.begin(events)
            for tokens in (10, 30):
                bill.gained(tokens)
                bill.take(b"data: {}\n\n")
                assert account.output - before == tokens
            bill.take(ended)
        assert account.output - before == counted


def test_a_stream_that_nobody_goes_on_with_costs_its_prompt() -> None:
    """Its first server computed that, whatever the ones say that were asked to go on."""
    tenant = Tenant("a", tokens_per_minute=1000)
    account = Account(tenant, Quota(tenant, 1, lambda: 0.0), None)
    for begins, spent in ((False, 0), (True, 14)):
        left, counter = float(account.quota.headers()["x-ratelimit-remaining-tokens"]), account.share.counter
        with account.request({"path": CHAT}, 10, account.share) as bill:
            bill.sent(10)
            if begins:
                bill.begin([(b"content-type", b"text/event-stream")])
                bill.take(b"data: {}\n\n" * 4)
                bill.sent(6)
            bill.refused()
        assert left - float(account.quota.headers()["x-ratelimit-remaining-tokens"]) == spent
        assert account.share.counter - counter == spent


def test_where_there_are_no_tenants_no_answer_is_counted() -> None:
    everybody = Accounts(NO_TENANTS, RouterMetrics(Backends())).everybody
    with everybody.request({"path": CHAT}, 10, everybody.share) as bill:
        bill.sent(10)
        bill.begin([(b"content-type", b"text/event-stream")])
        bill.take(b"data: {}\n\n" * 5)
    assert everybody.output == 0


def test_each_answer_is_paid_once_and_a_stream_is_known_by_its_answer() -> None:
    """A request that only agents can read, as one with NaN, streams as any other does."""
    tenant = Tenant("a", tokens_per_minute=1000)
    account = Account(tenant, Quota(tenant, 1, lambda: 0.0), None)

    def left() -> int:
        return int(account.quota.headers()["x-ratelimit-remaining-tokens"])

    def used(path: str, headers: RawHeaders, answer: bytes) -> tuple[int, int]:
        """Returns tokens of the prompt, which is estimated to have 10, and of the output."""
        before, output = left(), account.output
        with account.request({"path": path}, 10, account.share) as bill:
            bill.sent(10)
            bill.begin(headers)
            bill.take(answer)
            bill.complete()
        output = account.output - output
        return before - left() - output, output

    json, events = [(b"content-type", b"application/json")], [(b"content-type", b"text/event-stream; charset=utf-8")]
    head, usage = b'{"id":"resp_%d","object":"response","background":%b,', b'"usage":{"input_tokens":100,"output_tokens":50}}'
    whole, queued, ended = (head % (1, b"false") + usage, head % (2, b"true") + b'"usage":null}', head % (2, b"true") + usage)
    assert used(CHAT, events, b"data: {}\n\n" * 40) == (10, 40)
    assert used("/v1/responses", json, whole) == (100, 50)
    assert used("/v1/responses/resp_1", json, whole) == used("/v1/responses/resp_1/cancel", json, whole) == (10, 0)
    assert used("/v1/responses", json, queued) == used("/v1/responses/resp_2", json, queued) == (10, 0)
    assert [used("/v1/responses/resp_2", json, ended) for _ in range(2)] == [(10, 50), (10, 0)]
    stream = b'data: {"response":%b}\n\n'
    assert used("/v1/responses/resp_2", events, stream % ended) == (10, 0)
    assert [used("/v1/responses/resp_3", events, stream % (b"{" + usage)) for _ in range(2)] == [(10, 50), (10, 0)]
    started = stream % (head % (4, b"true") + b'"usage":null}') + stream % (b"{" + usage)
    assert used("/v1/responses", events, started) == (100, 50)
    assert used("/v1/responses/resp_4", json, head % (4, b"true") + usage) == (10, 0)
    cancelled = head % (5, b"true") + usage
    assert [used("/v1/responses/resp_5/cancel", json, cancelled) for _ in range(2)] == [(10, 50), (10, 0)]
    cut = stream % (head % (6, b"true") + b'"usage":null}') + b"data: {}\n\n" * 20
    assert used("/v1/responses", events, cut) == (10, 21), "one for each event"
    assert used("/v1/responses/resp_6/cancel", json, head % (6, b"true") + usage) == (10, 29), "what it has not paid"


@pytest.fixture
async def client(folder: Path, backends: list[StubBackend]) -> AsyncIterator[Callable[[str], httpx.AsyncClient]]:
    """client(key): a client of a router with tenants, which servers believe."""
    settings = ServerSettings(access_log=False, router_token=FileToken(folder / "token"))
    tenancy = Tenancy.read(folder / "tenants.yaml", None, 1)
    async with AsyncExitStack() as running:
        router = ServiceRouter(settings, RouterPolicy(), hold=HoldPolicy(steps=2.0), tenancy=tenancy)
        one = await running.enter_async_context(serving(router, {each.name: each.url for each in backends}, 2))

        def of(key: str) -> httpx.AsyncClient:
            one.headers["authorization"] = f"Bearer {key}"
            return one

        yield of


async def test_a_server_is_told_the_tenant(client: Callable[[str], httpx.AsyncClient]) -> None:
    forged = {"x-starling-tenant": "forged", "x-starling-priority": "99"}
    headers = (await client("chat-key").post(CHAT, json={"model": "m"}, headers=forged)).json()["headers"]
    told = (headers["x-starling-tenant"], headers["x-starling-priority"], headers["x-starling-router"])
    assert told == ("chat", "2", "the token")


async def test_a_server_is_told_of_a_tenants_only_request(
    client: Callable[[str], httpx.AsyncClient], backends: list[StubBackend]
) -> None:
    told, goes_on = list[str | None](), asyncio.Event()

    async def respond(request: web.Request) -> web.StreamResponse:
        told.append(request.headers.get("x-starling-lone"))
        await goes_on.wait()
        return web.json_response({})

    for backend in backends:
        backend.respond = respond

    async def have_come(count: int) -> bool:
        return len(told) == count

    one, open_ones = client("chat-key"), list[asyncio.Task[httpx.Response]]()
    for count in (1, 2):
        open_ones.append(asyncio.create_task(one.post(CHAT, json={"model": "m"}, headers={"x-starling-lone": "yes"})))
        await until(lambda count=count: have_come(count), "the request to come", 20)
    goes_on.set()
    await asyncio.gather(*open_ones)
    await one.post(CHAT, json={"model": "m"})
    assert told == ["yes", None, "yes"], "while another one is open, it is not alone"


async def test_a_key_of_no_tenant_is_refused_at_once(client: Callable[[str], httpx.AsyncClient], folder: Path) -> None:
    assert (await client("chat-key").post(CHAT, json={"model": "m"})).status_code == 200
    write(folder / "keys" / "chat", "new-key\n")
    answer = await client("chat-key").post(CHAT, json={"model": "m"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


async def test_a_key_that_moves_to_another_tenant_is_let_in_when_the_first_lets_it_go(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = Tenancy.read(folder / "tenants.yaml", None, 1).keys
    assert keys is not None
    write(folder / "keys" / "batch", "chat-key\nbatch-key\n")
    assert [keys.owner(b"batch-key") for _ in range(3)] == [None] * 3, "two tenants have one key"
    assert capsys.readouterr().out.count("no key of the tenant is let in") == 1
    write(folder / "keys" / "chat", "new-key\n")
    owners = [keys.owner(key.encode()) for key in ("batch-key", "chat-key", "new-key")]
    assert [owner and owner.name for owner in owners] == ["batch", "batch", "chat"]


async def test_quotas_are_counted_and_told(client: Callable[[str], httpx.AsyncClient], backends: list[StubBackend]) -> None:
    ends, came = asyncio.Event(), asyncio.Event()

    async def respond(_: web.Request) -> web.StreamResponse:
        came.set()
        await ends.wait()
        return web.json_response({"usage": {"prompt_tokens": 100, "completion_tokens": output}})

    output = 300
    for backend in backends:
        backend.respond = respond
    one = client("batch-key")
    first = asyncio.create_task(one.post(CHAT, json={"model": "m"}))
    await came.wait()
    second = await one.post(CHAT, json={"model": "m"})
    assert (second.status_code, second.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert second.headers["retry-after"] == "1" and second.headers["x-ratelimit-remaining-requests"] == "0"
    ends.set()
    assert (await first).headers["x-ratelimit-limit-tokens"] == "1000"
    answer = await one.post(CHAT, json={"model": "m"})
    assert 590 <= int(answer.headers["x-ratelimit-remaining-tokens"]) <= 700, "400 were used, and some came back since"
    assert await metric(one, "router_tenant_tokens_total") == 800
    assert await metric(one, "router_tenant_refused_total") == 1
    assert "batch-key" not in (await one.get("/metrics")).text
    output = 100_000
    await one.post(CHAT, json={"model": "m"})
    refused = await one.post(CHAT, json={"model": "m", "prompt": "x" * 9000})
    assert "has 0 left" in refused.json()["error"]["message"], "its prompt, which is too long by itself, was not read"
    assert await metric(one, "router_tenant_refused_total") == 2
    output = 0
    assert (await one.get("/v1/models")).status_code == (await one.post("/tokenize", json={"prompt": "x"})).status_code == 200
    assert await metric(one, "router_tenant_refused_total") == 2, "what costs nothing is let in"


async def test_a_tenants_only_request_goes_where_prompts_wait(folder: Path, backends: list[StubBackend]) -> None:
    """One at a time: a server with such a prompt has no room for another one, whose turn comes among all that wait."""
    (folder / "tenants.yaml").write_text("[{name: chat}, {name: batch}, {name: other}]")
    (folder / "keys" / "other").write_text("other-key")
    served, first_ends, goes_on = list[str](), asyncio.Event(), asyncio.Event()

    async def respond(request: web.Request) -> web.StreamResponse:
        served.append(request.headers["authorization"].removeprefix("Bearer ").removesuffix("-key"))
        await (first_ends if len(served) == 1 else goes_on).wait()
        return web.json_response({"usage": {"prompt_tokens": 1000, "completion_tokens": 1}})

    async def have_come(*names: str) -> None:
        async def all_have() -> bool:
            return served == [*names]

        await until(all_have, f"{names} to come, after {served}", 20)

    backends[0].respond = respond
    backends[0].state = backends[0].state.model_copy(update={"step_tokens": 100})
    tenancy = Tenancy.read(folder / "tenants.yaml", None, 1)
    router = ServiceRouter(ServerSettings(access_log=False), RouterPolicy(), hold=HoldPolicy(steps=0.5), tenancy=tenancy)
    async with serving(router, {"one": backends[0].url}, 1) as one:

        def post(key: str) -> asyncio.Task[httpx.Response]:
            headers = {"authorization": f"Bearer {key}-key"}
            return asyncio.create_task(one.post(CHAT, json={"model": "m", "prompt": "x " * 1000}, headers=headers))

        tasks = [post("batch")]
        await have_come("batch")
        tasks += [post("batch"), post("batch")]
        await until(lambda: are_held(one, 2), "two to be held", 20)
        first_ends.set()
        await have_come("batch", "batch")
        tasks.append(post("chat"))
        await have_come("batch", "batch", "chat")
        tasks.append(post("other"))
        await until(lambda: are_held(one, 2), "two to be held", 20)
        goes_on.set()
        assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}


async def are_held(one: httpx.AsyncClient, count: int) -> bool:
    return await metric(one, "router_tenant_held_requests") == count


async def test_a_light_tenant_goes_before_the_rest_of_a_flood(folder: Path, backends: list[StubBackend]) -> None:
    """One server runs one request at once. The flood's requests came first, and the other tenant is not behind them all."""
    (folder / "tenants.yaml").write_text("[{name: chat}, {name: batch}]")
    served, came, goes_on = list[str](), asyncio.Event(), asyncio.Event()

    async def respond(request: web.Request) -> web.StreamResponse:
        served.append(request.headers["authorization"].removeprefix("Bearer ").removesuffix("-key"))
        came.set()
        await goes_on.wait()
        return web.json_response({"usage": {"prompt_tokens": 10, "completion_tokens": 10}})

    backends[0].respond = respond
    backends[0].state = backends[0].state.model_copy(update={"room": 1, "step_tokens": 512})
    tenancy = Tenancy.read(folder / "tenants.yaml", None, 1)
    router = ServiceRouter(ServerSettings(access_log=False), RouterPolicy(), hold=HoldPolicy(steps=2.0), tenancy=tenancy)
    async with serving(router, {"one": backends[0].url}, 1) as one:

        def post(key: str, count: int) -> list[asyncio.Task[httpx.Response]]:
            headers = {"authorization": f"Bearer {key}-key"}
            return [asyncio.create_task(one.post(CHAT, json={"model": "m"}, headers=headers)) for _ in range(count)]

        async def held(count: int) -> None:
            async def are_held() -> bool:
                return await metric(one, "router_tenant_held_requests") == count

            await until(are_held, f"{count} requests to be held", 20)

        tasks = post("batch", 1)
        await came.wait()
        tasks += post("batch", 8)
        await held(8)
        tasks += post("chat", 2)
        await held(10)
        goes_on.set()
        assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}
    assert served[:4].count("chat") == 2 and len(served) == 11
