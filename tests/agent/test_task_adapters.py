"""A checkpoint in the form of Jina 3's authors: a request's task chooses its adapter, and the text before its inputs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from starling_engine import LLM
from starling_engine.errors import InvalidRequest
from torch.nn import functional as F
from transformers import AutoTokenizer, PreTrainedModel

from tests.agent.conftest import LiveServer, StartServer
from tests.engine.encoder_checkpoints import TASKS, write_adapted, write_tokenizer

TEXTS = ["lists are mutable", "a"]
CLOSE = 1e-5
ST = "sentence_transformers.models"
MODULES = [
    {"idx": 0, "name": "transformer", "path": "", "type": "custom_st.Transformer", "kwargs": ["task"]},
    {"idx": 1, "name": "pooler", "path": "1_Pooling", "type": f"{ST}.Pooling"},
    {"idx": 2, "name": "normalizer", "path": "2_Normalize", "type": f"{ST}.Normalize"},
]


class AdaptedCheckpoint:
    """The checkpoint's files, and what its authors' code makes of texts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._models: dict[str | None, PreTrainedModel] = write_adapted(folder)
        write_tokenizer(folder)
        (folder / "1_Pooling").mkdir()
        files = {"modules": MODULES, "1_Pooling/config": {"pooling_mode_mean_tokens": True}}
        for name, content in files.items():
            (folder / f"{name}.json").write_text(json.dumps(content))
        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    def vectors(self, texts: Sequence[str], task: str | None, dimensions: int = 64) -> list[list[float]]:
        prefix, model = TASKS.get(task or "", ""), self._models[task]
        found = []
        for text in texts:
            with torch.inference_mode():
                state = model(**self._tokenizer(prefix + text, return_tensors="pt")).last_hidden_state[0]
            found.append(F.normalize(state.mean(0)[:dimensions], dim=0).tolist())
        return found


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> AdaptedCheckpoint:
    return AdaptedCheckpoint(tmp_path_factory.mktemp("adapted"))


@pytest.fixture(scope="module")
def adapted_server(adapted: AdaptedCheckpoint, start_server: StartServer) -> LiveServer:
    return start_server("--max-num-seqs=8", model=str(adapted.folder))


def post(server: LiveServer, path: str, **body: Any) -> Any:
    return server.http.post(path, json={"model": str(body.pop("model")), **body})


def test_a_task_chooses_the_adapter_and_the_prompt(adapted: AdaptedCheckpoint, adapted_server: LiveServer) -> None:
    model = adapted_server.http.get("/v1/models").json()["data"][0]["id"]

    def vectors(**body: Any) -> list[list[float]]:
        found = post(adapted_server, "/v1/embeddings", model=model, input=TEXTS, **body)
        assert found.status_code == 200, found.text
        return [entry["embedding"] for entry in found.json()["data"]]

    for task in (None, *TASKS):
        for ours, theirs in zip(vectors(task=task), adapted.vectors(TEXTS, task), strict=True):
            assert ours == pytest.approx(theirs, abs=CLOSE)
    short = vectors(task="retrieval.query", dimensions=8)
    assert short[0] == pytest.approx(adapted.vectors(TEXTS, "retrieval.query", 8)[0], abs=CLOSE)
    assert vectors(task="retrieval.query", prompt_name="text-matching") != vectors(task="retrieval.query")
    cohere = post(adapted_server, "/v2/embed", model=model, texts=TEXTS, input_type="search_document").json()
    assert cohere["embeddings"]["float"][0] == pytest.approx(adapted.vectors(TEXTS, "retrieval.passage")[0], abs=CLOSE)
    refused = post(adapted_server, "/v1/embeddings", model=model, input="a", task="translation").json()["error"]
    assert refused["param"] == "task" and "possible: retrieval.query, retrieval.passage, text-matching" in refused["message"]


def test_pooling_takes_an_adapter_under_its_own_name(adapted: AdaptedCheckpoint, adapted_server: LiveServer) -> None:
    """The route's `task` is vLLM's; a score by vectors of tokens is the sum of the best cosines."""
    model = adapted_server.http.get("/v1/models").json()["data"][0]["id"]
    found = post(adapted_server, "/pooling", model=model, input=TEXTS, adapter="retrieval.query").json()["data"]
    for ours, theirs in zip(found, adapted.vectors(TEXTS, "retrieval.query"), strict=True):
        assert ours["data"] == pytest.approx(theirs, abs=CLOSE)
    refused = post(adapted_server, "/pooling", model=model, input="a", adapter="translation").json()["error"]
    assert refused["param"] == "adapter" and "no task of this model" in refused["message"]
    tokens = post(adapted_server, "/pooling", model=model, input=TEXTS, task="token_embed", normalize=True).json()["data"]
    first, second = (F.normalize(torch.tensor(one["data"]), dim=1) for one in tokens[:2])
    scored = post(adapted_server, "/score", model=model, text_1=TEXTS[0], text_2=TEXTS[1], task="token_embed").json()
    assert scored["data"][0]["score"] == pytest.approx((first @ second.T).max(1).values.sum().item(), abs=1e-3)


def test_a_script_names_a_task_too(adapted: AdaptedCheckpoint) -> None:
    with LLM(str(adapted.folder), max_num_seqs=8, num_threads=1, show_progress=False) as llm:
        found = llm.embed(TEXTS, use_tqdm=False, task="retrieval.query")
        for one, theirs in zip(found, adapted.vectors(TEXTS, "retrieval.query"), strict=True):
            assert one.outputs.embedding == pytest.approx(theirs, abs=CLOSE)
        with pytest.raises(InvalidRequest, match="no task of this model") as refusal:
            llm.embed("a", task="translation")
        assert refusal.value.param == "task"
