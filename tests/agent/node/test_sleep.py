"""Sleep through the admin endpoint: the pod is unready, but healthy."""

import time

import httpx
from starling_agent.node.standby import RETRY_SECONDS

from tests.agent.node.conftest import SECONDS, Agent, complete


def test_a_node_sleeps_and_wakes_by_its_admin_endpoint(agent: Agent) -> None:
    assert httpx.post(f"{agent.admin.base_url}/admin/sleep", trust_env=False).status_code == 401
    assert agent.http.post("/sleep").status_code == 404, "not without enable_sleep_mode"
    assert agent.admin.post("/admin/sleep?level=2").json() == {"is_sleeping": True}
    report = agent.reports(lambda report: report.asleep)[-1]
    assert not report.ready and report.healthy and report.phase == "serving"
    assert 'sleep_state="discard_all"} 1.0' in agent.http.get("/metrics").text
    assert agent.admin.get("/health").status_code == 200
    ready = agent.admin.get("/ready")
    assert ready.status_code == 503 and ready.json()["reason"] == "asleep"
    assert complete(agent).json()["error"]["code"] == "engine_asleep"
    assert agent.admin.get("/admin/is_sleeping").json() == {"is_sleeping": True}
    assert agent.admin.post("/admin/wake_up?tags=kv").status_code == 400
    assert agent.admin.post("/admin/wake_up").json() == {"is_sleeping": False}
    report = agent.reports(lambda report: report.ready)[-1]
    assert not report.asleep and report.engine_restarts == 0
    assert complete(agent).status_code == 200
    assert 'sleep_state="awake"} 1.0' in agent.http.get("/metrics").text


def test_a_node_sleeps_as_polls_order_it_and_wakes_when_one_says_so(agent: Agent) -> None:
    for query, status in (("deep", 400), ("3", 400), ("0", 200), ("2", 200)):
        assert agent.admin.get("/admin/report", params={"sleep": query}).status_code == status
    agent.reports(lambda report: report.asleep)
    assert complete(agent).json()["error"]["code"] == "engine_asleep"
    assert agent.admin.post("/admin/wake_up").json() == {"is_sleeping": False}
    limit = time.monotonic() + SECONDS
    while not agent.admin.get("/admin/is_sleeping").json()["is_sleeping"]:
        assert time.monotonic() < limit, "the order still holds"
    agent.admin.get("/admin/report", params={"sleep": "0"})
    agent.reports(lambda report: report.ready)
    assert complete(agent).status_code == 200


def test_what_people_put_to_sleep_is_not_woken_by_polls(agent: Agent) -> None:
    assert agent.admin.post("/admin/sleep").json() == {"is_sleeping": True}
    agent.reports(lambda report: report.asleep)
    agent.admin.get("/admin/report", params={"sleep": "0"})
    time.sleep(2 * RETRY_SECONDS)
    assert agent.admin.get("/admin/is_sleeping").json() == {"is_sleeping": True}
    assert agent.admin.post("/admin/wake_up").json() == {"is_sleeping": False}
