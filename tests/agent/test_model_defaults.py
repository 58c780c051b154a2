"""Defaults of the model's generation_config.json, for requests without the field."""

import json
import shutil

import pytest

from tests.agent.conftest import MODEL, REPOSITORY

FEW = 3


@pytest.fixture(scope="module")
def short(start_server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("short") / "model"
    shutil.copytree(REPOSITORY / MODEL, folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_new_tokens": FEW}))
    return start_server("--tensor-parallel-size", "2", model=str(folder))


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "What does os.path.join do?"}]}),
        ("/v1/completions", {"prompt": "import os"}),
    ],
)
@pytest.mark.parametrize(("max_tokens", "expected"), [(None, FEW), (5, 5)])
def test_max_new_tokens_of_the_model_holds_unless_the_request_has_a_limit(short, route, body, max_tokens, expected):
    limit = {} if max_tokens is None else {"max_tokens": max_tokens}
    answer = short.http.post(route, json={**body, **limit, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == expected
