"""`starling chat`: when is its first argument a service?"""

import pytest
import typer
from starling_cli.commands.chat import _service_and_question

from tests.cli.commands.running import starling

URL = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("name", "prompt", "url", "expected"),
    [
        (None, None, None, (None, None)),
        ("quickstart", None, None, ("quickstart", None)),
        ("my-service-2", None, None, ("my-service-2", None)),
        ("quickstart", "What is a list?", None, ("quickstart", "What is a list?")),
        ("What is a list?", None, None, (None, "What is a list?")),
        ("Hello", None, None, (None, "Hello")),
        ("why?", None, None, (None, "why?")),
        ("hello", None, URL, (None, "hello")),
        (None, None, URL, (None, None)),
        ("a" * 41, None, None, (None, "a" * 41)),
    ],
)
def test_service_and_question(name, prompt, url, expected):
    assert _service_and_question(name, prompt, url) == expected


@pytest.mark.parametrize(("name", "prompt", "url"), [("a", "b", URL), ("What is", "a list?", None)])
def test_contradictions(name, prompt, url):
    with pytest.raises(typer.Exit):
        _service_and_question(name, prompt, url)


def test_a_service_without_a_cluster_says_what_to_do():
    answer = starling("chat", "quickstart", "hello")
    assert answer.returncode == 1
    assert "no cluster is configured" in answer.stderr
    assert "--kubeconfig" in answer.stderr.splitlines()[-1]


def test_a_question_of_one_word_without_a_cluster_says_how_a_server_here_is_asked():
    answer = starling("chat", "hello")
    assert answer.returncode == 1
    assert answer.stderr.endswith("starling chat --url http://127.0.0.1:8000 hello\n")
