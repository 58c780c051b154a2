"""Headers of llm-d and of Gateway API Inference Extension, and their older names."""

import asyncio
import json
from typing import Any

import pytest
from starling_agent.http.errors import ApiError
from starling_router.accounts import MOST_FLOWS, Accounts
from starling_router.backend import Backends
from starling_router.gateway_headers import with_named_model
from starling_router.hold_queue import HoldPolicy
from starling_router.metrics import RouterMetrics
from starling_router.tenants import NO_TENANTS

from tests.router.backends import StubBackend
from tests.router.serving import Start
from tests.router.test_hold import CHAT, DROPPED, Limited, set_ready, until_as_many, until_held

NAMED, NAMED_BEFORE = "x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite"
FLOW, FLOW_BEFORE = "x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"


def scope(method: str = "POST", path: str = CHAT, **headers: str) -> dict[str, Any]:
    listed = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"method": method, "path": path, "headers": listed}


@pytest.mark.parametrize("name", [NAMED, NAMED_BEFORE])
def test_a_header_names_the_model_and_all_else_of_the_body_stays(name: str) -> None:
    body = b'{"seed": 12345678901234567890123, "model": "a", "temperature":1.10, "messages": [ "\\u00e9" ]}'
    named = with_named_model(scope(**{name: "adapter"}), body)
    assert json.loads(named) == json.loads(body) | {"model": "adapter"}
    assert all(part in named for part in (b"12345678901234567890123", b"1.10", b'[ "\\u00e9" ]'))
    assert json.loads(with_named_model(scope(**{name: "b"}), b"{}")) == {"model": "b"}


def test_bodies_without_a_header_and_those_that_no_model_reads_stay() -> None:
    assert with_named_model(scope(), b'{"model": "a"} ') == b'{"model": "a"} '
    assert with_named_model(scope(**{NAMED: ""}), b"[NaN]") == b"[NaN]"
    assert with_named_model(scope(path="/v1/responses/resp_1/cancel", **{NAMED: "b"}), b"{}") == b"{}"
    assert with_named_model(scope("GET", **{NAMED: "b"}), b"") == b""
    assert json.loads(with_named_model(scope(**{NAMED_BEFORE: "old", NAMED: "new"}), b"{}")) == {"model": "new"}


@pytest.mark.parametrize("body", [b"[]", b"no json", b'{"temperature": NaN}'])
def test_a_body_that_cannot_be_for_the_model_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError, match="x-llm-d-model-name-rewrite needs") as error:
        with_named_model(scope(**{NAMED: "b"}), body)
    assert (error.value.status, error.value.detail.param) == (400, "model")


async def test_servers_get_the_body_for_the_model(start: Start) -> None:
    client = await start()
    answer = await client.post(CHAT, json={"model": "a", "messages": []}, headers={NAMED: "adapter"})
    assert json.loads(answer.json()["body"]) == {"model": "adapter", "messages": []}
    assert (await client.post(CHAT, content=b"[]", headers={NAMED: "adapter"})).status_code == 400


def test_flows_are_known_by_either_name_and_the_last_ones_alone() -> None:
    everybody = Accounts(NO_TENANTS, RouterMetrics(Backends())).everybody
    first = everybody.share_of(scope(**{FLOW: "a"}))
    assert everybody.share_of(scope(**{FLOW_BEFORE: "a"})) is first is not everybody.share_of(scope())
    assert everybody.share_of(scope()) is everybody.share
    for number in range(MOST_FLOWS - 1):
        everybody.share_of(scope(**{FLOW: str(number)}))
    assert everybody.share_of(scope(**{FLOW: "a"})) is first
    for number in range(MOST_FLOWS):
        everybody.share_of(scope(**{FLOW: str(number)}))
    assert everybody.share_of(scope(**{FLOW: "a"})) is not first


def test_prompts_and_outputs_of_a_flow_are_counted() -> None:
    everybody = Accounts(NO_TENANTS, RouterMetrics(Backends())).everybody
    share = everybody.share_of(scope(**{FLOW: "a"}))
    with everybody.request(scope(), 10, share) as bill:
        bill.sent(10)
        bill.begin([(b"content-type", b"text/event-stream")])
        bill.take(b"data: {}\n\n" * 5)
    assert (share.counter, everybody.share.counter) == (15, 0)


async def test_a_light_flow_goes_before_the_rest_of_a_flood(start: Start, backends: list[StubBackend]) -> None:
    """Flows have one bound together: who names new ones gets no more places."""
    set_ready(backends[1], False)
    backends[0].respond = limited = Limited(places=1)
    limited.may_end.clear()
    client = await start(ready=1, hold=HoldPolicy(requests=10))

    def post(header: str, flow: str, *numbers: int) -> "list[asyncio.Task[int]]":
        async def status(number: int) -> int:
            return (await client.post(CHAT, json={"number": number}, headers={header: flow})).status_code

        return [asyncio.create_task(status(number)) for number in numbers]

    tasks = post(FLOW, "flood", 0)
    await until_as_many(limited.numbers, 1)
    tasks += post(FLOW, "flood", *range(1, 9))
    await until_held(client, 8)
    tasks += post(FLOW_BEFORE, "light", 100, 101)
    await until_held(client, 10)
    refused = await client.post(CHAT, json={"number": 200}, headers={FLOW: "another"})
    assert (refused.status_code, refused.headers[DROPPED]) == (429, "rejected-saturated")
    limited.may_end.set()
    assert await asyncio.gather(*tasks) == [200] * 11
    assert {100, 101} < set(limited.numbers[:5]), limited.numbers
