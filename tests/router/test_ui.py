"""The page at /ui, and the state that it shows: to whom, and of what."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from aiohttp import web
from starling_agent.api_keys import ApiKeys
from starling_agent.contract.backend import BackendLoad
from starling_agent.http.outermost import QUIET_ROUTES
from starling_agent.settings import ServerSettings
from starling_router.hold_queue import HoldPolicy
from starling_router.picker import RouterPolicy
from starling_router.router import ServiceRouter
from starling_router.tenants import Tenancy
from starling_router.ui.app import page_headers

from tests.router.backends import StubBackend
from tests.router.browser import CHROMIUM, Tab, browsing
from tests.router.serving import Start, serving

CHAT = "/v1/chat/completions"
LOAD = BackendLoad(
    running=3,
    waiting=1,
    kv_blocks=100,
    kv_blocks_used=40,
    prompt_tokens_total=900,
    generated_tokens_total=500,
    prefix_queries_total=800,
    prefix_hits_total=200,
)
MARKUP = '<img src=x onerror="window.markup=1">'
KEY = {"authorization": "Bearer one"}


def test_a_page_may_run_its_own_script_and_style_alone() -> None:
    policy = page_headers("<style>a</style><script>b\n</script>")["content-security-policy"]
    # printf 'b\n' | openssl dgst -sha256 -binary | base64
    assert "script-src 'sha256-AmOCmYm2/ZVPcrqvL8ZLwuLwHWktTecphuqAj26ZgT8='" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy


async def test_the_page_is_served_to_all_and_its_state_to_keys(
    start: Start, backends: list[StubBackend], routers: list[ServiceRouter]
) -> None:
    backends[0].state = backends[0].state.model_copy(update={"group": "chat-1", "revision": "r1", "load": LOAD})
    client = await start(api_keys=ApiKeys(["one"]))
    page = await client.get("/ui")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"] == page_headers(page.text)["content-security-policy"]
    assert not re.findall(r"https?:|//\w|url\(|@import|innerHTML", re.sub(r"// .*", "", page.text)), "it needs nothing else"
    head = await client.head("/ui/")
    assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", str(len(page.content)))
    assert [(await client.get("/ui/state", headers=headers)).status_code for headers in ({}, KEY)] == [401, 200]
    assert routers[0].responses["/ui/state", 200] == 1 and "/ui/state" in QUIET_ROUTES, "the log leaves it out"
    for path in ("/ui", "/ui/state"):
        refused = await client.post(path, headers=KEY)
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")
        assert refused.json()["error"]["code"] == "method_not_allowed"
    assert not any(path.startswith("/ui") for backend in backends for path in backend.paths)

    answer = await client.post(CHAT, headers=KEY, json={"model": "m", "messages": [{"role": "user", "content": "x" * 1024}]})
    assert answer.status_code == 200
    state = (await client.get("/ui/state", headers=KEY)).json()
    assert {name: state[name] for name in ("sees", "models", "known", "ready", "held", "cached_tokens_total", "tenants")} == {
        "sees": "all", "models": ["m"], "known": 2, "ready": 2, "held": 0, "cached_tokens_total": 0, "tenants": [],
    }  # fmt: skip
    assert state["prompt_tokens_total"] > 200
    assert state["backends"] == [
        {
            "name": "chat-1-0", "ready": True, "open": 0, "pod": "chat-1-0", "group": "chat-1", "revision": "r1",
            "load": LOAD.model_dump(), "weight": None,
        },
        {"name": "chat-2-0", "ready": True, "open": 0, "pod": "chat-2-0", "group": "", "revision": "", "load": None,
         "weight": None},
    ]  # fmt: skip


@pytest.fixture
async def of_tenants(tmp_path: Path, backends: list[StubBackend]) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a router with the tenants chat, batch and staff, who sees all."""
    (tmp_path / "tenants.yaml").write_text("[{name: chat}, {name: batch, concurrent: 4}, {name: staff, seesAll: true}]")
    (tmp_path / "keys").mkdir()
    for name in ("chat", "batch", "staff"):
        (tmp_path / "keys" / name).write_text(f"{name}-key")
    tenancy = Tenancy.read(tmp_path / "tenants.yaml", None, 1)
    router = ServiceRouter(ServerSettings(access_log=False), RouterPolicy(), tenancy=tenancy)
    async with serving(router, {each.name: each.url for each in backends}, 2) as client:
        yield client


async def test_a_tenant_sees_itself_and_who_may_sees_all(of_tenants: httpx.AsyncClient, backends: list[StubBackend]) -> None:
    began, ends = asyncio.Event(), asyncio.Event()

    async def respond(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        for _ in range(3):
            await answer.write(b'data: {"choices":[]}\n\n')
        began.set()
        await ends.wait()
        return answer

    for backend in backends:
        backend.respond = respond

    async def state(tenant: str) -> dict[str, object]:
        answer = await of_tenants.get("/ui/state", headers={"authorization": f"Bearer {tenant}-key"})
        return dict(answer.json()) if answer.status_code == 200 else {"status": answer.status_code}

    headers = {"authorization": "Bearer batch-key"}
    async with of_tenants.stream("POST", CHAT, json={"model": "m", "stream": True}, headers=headers) as answer:
        await began.wait()
        async for _ in answer.aiter_raw():
            break
        batch, staff = await state("batch"), await state("staff")
        ends.set()
    assert await state("nobody") == {"status": 401}
    assert (batch["sees"], batch["backends"], batch["prompt_tokens_total"]) == ("tenant", [], None)
    (own,) = batch["tenants"]  # type: ignore[misc]
    assert (own["name"], own["open"], own["requests_total"]) == ("batch", 1, 1)
    assert own["output_tokens_total"] > 0, "tokens of answers that have not ended count"
    assert own["quota"] == {"x-ratelimit-limit-requests": "4", "x-ratelimit-remaining-requests": "3"}
    assert (staff["sees"], [each["name"] for each in staff["tenants"]]) == ("all", ["chat", "batch", "staff"])  # type: ignore[attr-defined]
    assert len(staff["backends"]) == 2  # type: ignore[arg-type]


async def converse(request: web.Request) -> web.StreamResponse:
    """Answers as a model that reasons; one that is asked to fail does, one to wait never ends, and one for room has none."""
    if request.path == "/v1/models":
        return web.json_response({"data": [{"id": "m"}, {"id": MARKUP}]})
    asked = (await request.json())["messages"][-1]["content"]
    if asked == "room":
        return web.json_response({"error": {"message": "full", "code": "queue_full"}}, status=429)
    answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await answer.prepare(request)

    async def say(event: dict[str, object]) -> None:
        await answer.write(f"data: {json.dumps(event)}\n\n".encode())

    await say({"choices": [{"delta": {"reasoning_content": f"thoughts {MARKUP}"}}]})
    for piece in ("ä answer ", MARKUP):
        await say({"choices": [{"delta": {"content": piece}}]})
    if asked == "fail":
        await say({"error": {"message": f"failed {MARKUP}"}})
    elif asked == "wait":
        await asyncio.sleep(60)
    else:
        usage = {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
        await say({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        await say({"choices": [], "usage": usage})
        await answer.write(b"data: [DONE]\n\n")
    return answer


@pytest.mark.whole
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium-headless-shell, of Debian's packages: make browser")
@pytest.mark.parametrize("width", [360, 390, 1280])
async def test_in_a_browser(start: Start, backends: list[StubBackend], tmp_path: Path, width: int) -> None:
    names = {"pod": MARKUP, "group": "long" * 30, "revision": f"revision-{MARKUP}", "models": [MARKUP], "load": LOAD}
    backends[0].state = backends[0].state.model_copy(update=names)
    for backend in backends:
        backend.respond = converse
    client = await start(hold=HoldPolicy(), api_keys=ApiKeys(["one"]))
    async with browsing(tmp_path) as tab:
        await tab.open(f"{str(client.base_url).rstrip('/')}/ui", width)
        await give_keys(tab)
        await see_state(tab)
        await see_changes(tab, client, backends[0])
        await chat(tab)
        page = "document.documentElement"
        assert await tab.run(f"[innerWidth, {page}.scrollWidth - {page}.clientWidth]") == [width, 0], "nothing goes past the edge"
        assert await tab.run("[window.markup ?? null, document.querySelectorAll('img, script').length]") == [None, 1]
        assert [said for said in tab.complaints if "status of 401" not in said] == []


async def give_keys(tab: Tab) -> None:
    await tab.until("document.activeElement.id === 'key'")
    for key in ("other", "one"):
        await tab.type("#key", key)
        await tab.press("Enter", 13)
        if key == "other":
            await tab.until("document.querySelector('#problem').innerText === 'The API key is not known here.'")
    await tab.until("document.querySelectorAll('#servers tbody tr').length === 2")
    assert await tab.run("sessionStorage.getItem('starling.key')") == "one" and await tab.run("localStorage.length") == 0


async def see_state(tab: Tab) -> None:
    text = "document.querySelector('#servers tbody').innerText"
    for seen in (MARKUP, "40 %", "25 %", "ready"):
        await tab.until(f"{text}.includes({json.dumps(seen)})")
    await tab.until(f"document.querySelector('#revisions').innerText.includes({json.dumps(f'revision-{MARKUP}: 1 of 1')})")
    await tab.until(f"[...document.querySelector('#model').options].some((option) => option.value === {json.dumps(MARKUP)})")


def figure(name: str) -> str:
    """The overview's figure of that name, in the page's language."""
    named = f"[...document.querySelectorAll('#numbers div')].find((each) => each.children[0].textContent === {json.dumps(name)})"
    return f"{named}?.querySelector('dd span').textContent"


async def see_changes(tab: Tab, client: httpx.AsyncClient, backend: StubBackend) -> None:
    """Tokens are generated, and a request waits for room until its client leaves."""
    rate, held = figure("Tokens/s"), figure("Held here")
    await tab.until(f"{rate} === '0' && {held} === '0'")
    load = LOAD.model_copy(update={"generated_tokens_total": LOAD.generated_tokens_total + 20_000})
    backend.state = backend.state.model_copy(update={"load": load})
    await tab.until(f"Number({rate}.replace(',', '')) > 200")  # of the last ten seconds, or more where the machine stands still
    waits = asyncio.create_task(client.post(CHAT, headers=KEY, json={"messages": [{"role": "user", "content": "room"}]}))
    await tab.until(f"{held} === '1'")
    waits.cancel()
    await tab.until(f"{held} === '0'")


async def chat(tab: Tab) -> None:
    answers = "[...document.querySelectorAll('article.answer')]"
    said = f"{answers}.at(-1)?.innerText ?? ''"
    for asked, kind, end in (("hi", "soft", "4 cached"), ("fail", "problem", f"Failed {MARKUP}.")):
        await tab.type("#message", asked)
        await tab.press("Enter", 13)
        await tab.until(f"({answers}.at(-1)?.querySelector('p.{kind}')?.innerText ?? '').includes({json.dumps(end)})")
        assert await tab.run(f"{answers}.at(-1).querySelector('.reasoning .said').innerText") == f"thoughts {MARKUP}"
        assert f"ä answer {MARKUP}" in await tab.run(said)
    await tab.type("#message", "wait")
    await tab.press("Enter", 13)
    await tab.until(f"({said}).includes('answer')")
    await tab.press("Escape", 27)
    await tab.until(f"({said}).includes('Stopped.')")
