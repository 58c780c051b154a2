"""LangChain's own standard tests against the server."""

import os
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from tests.agent.clients.environment import program
from tests.agent.clients.forced import Body, calling, demands_a_call, narrowed, offered, saying, shaped
from tests.agent.clients.forcing_proxy import forcing_proxy

SUITE = Path(__file__).with_name("langchain_suite.py")
JOKE = {"setup": "Why?", "punchline": "Because."}
ARGUMENTS: dict[str, Body] = {
    "magic_function": {"input": 3},
    "magic_function_no_args": {},
    "my_adder_tool": {"a": 1, "b": 2},
    "greeting_generator": {"answer_style": "pirate"},
    "get_weather": {"location": "San Francisco, CA"},
    "unicode_customer": {"customer_name": "你好, こんにちは", "description": "A company."},
    "Joke": JOKE,
    "joke": JOKE,
    "JokeDict": JOKE,
}
"""The arguments that the suite's tests want, by the tool's name."""
SKIPPED = {
    *("test_pdf_inputs", "test_audio_inputs", "test_image_inputs", "test_image_tool_message", "test_pdf_tool_message"),
    "test_stream_time",
}
"""Tests of media, which the server refuses, and one of recorded answers."""
OTHER_API = {"TestChatOpenAI.test_anthropic_inputs", "TestResponses.test_anthropic_inputs", "TestChatAnthropic.test_json_mode"}
RESPONSES = pytest.param("TestResponses", 43, marks=pytest.mark.whole)


def clever(body: Body) -> Body:
    """Changes a request of the suite as its test wants it answered."""
    if demands_a_call(body):
        return narrowed(body, ARGUMENTS)
    if "response_format" in body or "text" in body:
        return shaped(body, JOKE)
    if _asks_for_a_tool(body):
        (name,) = offered(body)
        return calling(body, **{name: ARGUMENTS[name]})
    return saying(body, "Hello.")


def _asks_for_a_tool(body: Body) -> bool:
    messages = body["messages"] if "messages" in body else body["input"]
    last: Any = messages[-1] if isinstance(messages, list) else {}
    return bool(offered(body)) and last.get("role") == "user" and isinstance(last["content"], str)


@pytest.fixture(scope="session")
def python() -> str:
    return program("python", "python")


@pytest.mark.parametrize(("classes", "count"), [("TestChat", 86), RESPONSES])
def test_langchains_own_tests_of_a_chat_model_pass(python, judged, tmp_path, classes, count):
    """Tests that need a clever model get their answer forced; what the client and the server do with it is judged."""
    report = tmp_path / "report.xml"
    with forcing_proxy(judged.url, clever) as proxy:
        flags = ("-c", os.devnull, "--rootdir", str(tmp_path), "--noconftest", "--import-mode=importlib", "-o", "asyncio_mode=auto")
        command = [python, "-m", "pytest", *flags, "-k", classes, f"--junitxml={report}", str(SUITE)]
        ended = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "JUDGED_URL": proxy.url}, capture_output=True, text=True, timeout=240
        )
    assert ended.returncode == 0, ended.stdout[-5000:]
    cases = [*ET.parse(report).iter("testcase")]
    skipped = {_name(case) for case in cases if case.find("skipped") is not None}
    assert {name for name in skipped if name.partition(".")[2] not in SKIPPED} == {name for name in OTHER_API if classes in name}
    assert len(cases) - len(skipped) == count


def _name(case: ET.Element) -> str:
    """Returns a test's class and its name."""
    return f"{case.attrib['classname'].rpartition('.')[2]}.{case.attrib['name']}"
