"""A checkpoint whose tokenizer has an added token that the model has no embedding of: only requests with it are refused."""

import json
import shutil
from pathlib import Path

import pytest

from tests.agent.conftest import MODEL, REPOSITORY, StartServer

EXTRA = {"content": "<|extra|>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("extended") / "model"
    shutil.copytree(REPOSITORY / MODEL, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({"id": 4096, **EXTRA})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_a_request_with_a_token_that_has_no_embedding_is_refused_and_others_are_served(
    extended: Path, start_server: StartServer
) -> None:
    server = start_server(model=str(extended))
    model = server.http.get("/v1/models").json()["data"][0]["id"]
    for path, field in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
        refused = server.http.post(path, json={"model": model, field: "a <|extra|>"})
        assert refused.status_code == 400, refused.text
        message = refused.json()["error"]["message"]
        assert "must be in [0, 4095], got 4096" in message and "'<|extra|>'" in message and "no embedding" in message
    served = server.http.post("/v1/completions", json={"model": model, "prompt": "a <|extra", "max_tokens": 3})
    assert served.status_code == 200 and served.json()["usage"]["completion_tokens"] > 0


def test_a_prediction_ends_before_a_token_that_has_no_embedding(extended: Path, start_server: StartServer) -> None:
    """Such a token, as a draft, would be looked up, and end the step of all requests in it."""
    server = start_server(model=str(extended))
    model = server.http.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": "go on"}], "max_tokens": 12, "temperature": 0}
    plain = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    for text in ("<|extra|>", f"{plain}<|extra|>", f"{plain[:5]}<|extra|>{plain[5:]}"):
        predicted = server.http.post("/v1/chat/completions", json=body | {"prediction": {"type": "content", "content": text}})
        assert predicted.status_code == 200, predicted.text
        assert predicted.json()["choices"][0]["message"]["content"] == plain
