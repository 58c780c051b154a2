"""The examples of docs/clients.md that are programs, or variables of one, work as they stand there."""

import os
import subprocess
import sys

import httpx
import pytest

from tests.agent.clients.documented import MODEL, example, exported
from tests.agent.clients.environment import OFFLINE, program
from tests.agent.clients.forced import saying
from tests.agent.clients.forcing_proxy import forcing_proxy

OURS = ("OpenAI's SDK", "Anthropic's SDK")
"""Their packages are in the environment of the tests."""


@pytest.mark.parametrize("section", [*OURS, "LangChain", pytest.param("LiteLLM", marks=pytest.mark.whole)])
def test_a_program_prints_the_answer(judged, section):
    python = sys.executable if section in OURS else program("python", "python")
    with forcing_proxy(judged.url, lambda body: saying(body, "It counts.")) as proxy:
        command = [python, "-c", example(section, "python", proxy.url)]
        ended = subprocess.run(command, env=os.environ | OFFLINE, capture_output=True, text=True, timeout=120)
    assert ended.stdout == "It counts.\n", ended.stderr


def test_open_webui_finds_the_model(judged):
    """Open WebUI asks this address for the models that it shows."""
    variables = exported("Open WebUI", judged.url)
    headers = {"Authorization": f"Bearer {variables['OPENAI_API_KEY']}"}
    answer = httpx.get(f"{variables['OPENAI_API_BASE_URL']}/models", headers=headers)
    assert MODEL in [model["id"] for model in answer.json()["data"]]
