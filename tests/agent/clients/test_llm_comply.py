"""A public judge of APIs, which compares answers with the published descriptions of three."""

import json
import subprocess

import pytest

from tests.agent.clients.environment import program
from tests.agent.clients.forced import Body, demands_a_call, narrowed, saying
from tests.agent.clients.forcing_proxy import forcing_proxy

NO_IMAGES = "images are not supported yet"
FAILURES = {
    "open-responses": {"image-input": NO_IMAGES},
    "openai-chat": {"chat-image-input": NO_IMAGES},
    "anthropic": {"anth-image-input": NO_IMAGES},
}
COUNTS = {"open-responses": 13, "openai-chat": 9, "anthropic": 9}
KEY_FLAGS = {"anthropic": ("--auth-header", "x-api-key", "--no-bearer")}


def clever(body: Body) -> Body:
    if demands_a_call(body):
        return narrowed(body, {"get_weather": {"location": "San Francisco"}})
    thoughts = "<think>\nHm.\n</think>\n\n" if "thinking" in body or "reasoning" in body else ""
    return saying(body, f"{thoughts}Hello there.")


@pytest.fixture(scope="session")
def llm_comply() -> str:
    return program("python", "llm-comply")


@pytest.mark.parametrize("api", FAILURES)
def test_only_known_checks_of_the_api_fail(llm_comply, judged, api):
    model = "claude-4" if api == "anthropic" else "gpt-5.5"
    command = [llm_comply, "--format", api, "-k", "none", "-m", model, "--json", *KEY_FLAGS.get(api, ())]
    with forcing_proxy(judged.url, clever) as proxy:
        ended = subprocess.run([*command, "-u", f"{proxy.url}/v1"], capture_output=True, text=True, timeout=120)
    results = json.loads(ended.stdout)["results"]
    failed = {result["id"]: result for result in results if result["status"] != "passed"}
    assert failed.keys() == FAILURES[api].keys(), failed
    assert len(results) == COUNTS[api]
