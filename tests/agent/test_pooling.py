"""Vectors, scores and rankings, which are those of sentence-transformers for checkpoints that it wrote itself.

The file is long because all kinds of checkpoints are written once, and asked on every route.
"""

import base64
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from starling_agent.node.engine_report import report_of_engine
from starling_agent.openai.pooling import check_prompts
from starling_engine import LLM, PoolingParams
from starling_engine.errors import InvalidRequest, PromptTooLong
from starling_engine.frontend.control_tokens import ChatPrompt
from starling_engine.frontend.cross_encoder import pair_scorer
from starling_engine.frontend.pooled_texts import PooledTexts
from starling_engine.frontend.prompt_encoder import PromptEncoder, PromptForm
from starling_engine.frontend.tokenizer import Tokenizer, Truncation
from starling_engine.model_config.classifier import sigmoid
from starling_engine.model_config.config import load_model_config

from tests.agent.conftest import LiveServer, StartServer
from tests.agent.scored_texts import CUT, DOCUMENTS, INSTRUCTION, QUERY, TEXTS
from tests.engine.checkpoints import edit_json
from tests.engine.real_engine import running

REPOSITORY = Path(__file__).parents[2]
LIBRARY = Path(os.environ.get("STARLING_CACHE") or Path.home() / ".cache/starling") / "sentence-transformers-6.2.0"
FLAGS = ("--kv-cache-memory-bytes=16MiB", "--max-num-seqs=8")
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
SETTINGS: dict[str, Any] = {"kv_cache_memory_bytes": 16 << 20, "max_num_seqs": 8, "num_threads": 1, "show_progress": False}
CLOSE = 1e-3
PAIRS = {"text_1": QUERY, "text_2": DOCUMENTS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints, written in a process of its own: the library takes seconds to import."""
    if not LIBRARY.exists():
        pytest.skip("sentence-transformers is not here: see `make sentence-transformers`")
    target = tmp_path_factory.mktemp("checkpoints")
    command = [sys.executable, "-W", "ignore", "-m", "tests.agent.sentence_transformers_checkpoints", str(target)]
    paths = os.pathsep.join((str(LIBRARY), str(REPOSITORY), os.environ.get("PYTHONPATH", "")))
    subprocess.run(command, check=True, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": paths}, capture_output=True)
    return target


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    return json.loads((folder / "expected.json").read_text())


@pytest.fixture(scope="module")
def last(folder: Path, start_server: StartServer) -> LiveServer:
    return start_server(*FLAGS, model=str(folder / "last"))


@pytest.fixture(scope="module")
def messages(folder: Path, start_server: StartServer) -> LiveServer:
    return start_server(*FLAGS, model=str(folder / "messages"))


@pytest.fixture(scope="module")
def reranker(folder: Path, start_server: StartServer) -> LiveServer:
    return start_server(*FLAGS, "--max-num-waiting-tokens=4096", model=str(folder / "reranker"))


@pytest.fixture(scope="module")
def encoder(folder: Path, start_server: StartServer) -> LiveServer:
    return start_server("--max-num-seqs=8", model=str(folder / "encoder"))


@pytest.fixture(scope="module")
def cross(folder: Path, start_server: StartServer) -> LiveServer:
    return start_server("--max-num-seqs=8", model=str(folder / "cross"))


@pytest.fixture(scope="module")
def colbert(folder: Path, start_server: StartServer) -> LiveServer:
    return start_server("--max-num-seqs=8", model=str(folder / "colbert"))


@pytest.fixture(scope="module")
def splade(folder: Path, start_server: StartServer) -> LiveServer:
    return start_server("--max-num-seqs=8", model=str(folder / "splade"))


@functools.cache
def model_of(server: LiveServer) -> Any:
    return server.http.get("/v1/models").json()["data"][0]["id"]


def answer(server: LiveServer, path: str, **body: Any) -> Any:
    found = server.http.post(path, json={"model": model_of(server), **body})
    assert found.status_code == 200, found.text
    return found.json()


def vectors(server: LiveServer, path: str = "/v1/embeddings", **body: Any) -> list[list[float]]:
    found = answer(server, path, **{"input": TEXTS, **body})
    assert found["usage"]["prompt_tokens"] > 0
    return [entry["embedding" if path == "/v1/embeddings" else "data"] for entry in found["data"]]


def same(ours: Any, theirs: Any) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, abs=CLOSE)


@pytest.mark.parametrize(
    ("name", "body"), [("plain", {}), ("query", {"prompt_name": "query"}), ("plain", {"truncate_prompt_tokens": -1})]
)
def test_vectors_of_an_encoder_with_dense_modules(name: str, body: dict[str, Any], encoder: LiveServer, expected: Any) -> None:
    same(vectors(encoder, **body), expected["encoder"][name])


def rows(entry: Any) -> list[list[float]]:
    """Returns the rows of an input, whose numbers came as base64 or as lists."""
    if isinstance(entry["data"], list):
        assert "shape" not in entry
        found: list[list[float]] = entry["data"]
        return found
    return np.frombuffer(base64.b64decode(entry["data"]), "<f4").reshape(entry["shape"]).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", [{}, {"encoding_format": "base64"}])
def test_each_token_has_a_vector(form: dict[str, Any], last: LiveServer, expected: Any) -> None:
    found = answer(last, "/pooling", input=TEXTS, task="token_embed", **form)["data"]
    for entry, theirs in zip(found, expected["last"]["tokens"], strict=True):
        same(rows(entry), theirs)
    short = answer(last, "/pooling", input=TEXTS, task="token_embed", dimensions=16, normalize=False, **form)["data"]
    assert [len(row) for row in rows(short[0])] == [16] * len(expected["last"]["tokens"][0])


def test_each_token_has_the_labels_of_a_head(cross: LiveServer, expected: Any) -> None:
    logits = expected["cross"]["token logits"]
    for form in ({}, {"encoding_format": "base64"}):
        found = answer(cross, "/pooling", input=TEXTS, task="token_classify", use_activation=False, **form)["data"]
        for entry, theirs in zip(found, logits, strict=True):
            same(rows(entry), theirs)
    (probabilities,) = answer(cross, "/pooling", input=TEXTS[0], task="token_classify")["data"]
    same(rows(probabilities), [[sigmoid(one)] for (one,) in logits[0]])
    (text,) = answer(cross, "/pooling", input=DOCUMENTS[0], task="classify")["data"]
    assert text["data"] == answer(cross, "/classify", input=DOCUMENTS[0])["data"][0]["probs"]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"task": "token_classify"}, "model", "no classification head"),
        ({"task": "classify"}, "model", "no classification head"),
        ({"task": "token_embed", "pooling": "mean"}, "pooling", "numbers of its own"),
        ({"task": "token_embed", "use_activation": False}, "use_activation", "token_classify"),
        ({"task": "token_embed", "dimensions": 65}, "dimensions", "16, 32, 64"),
        ({"task": "token_classify", "normalize": True}, "normalize", "is for vectors"),
        ({"task": "plugin"}, "task", "token_embed"),
        ({"task": "sparse_embed"}, "model", "are not sparse"),
        ({"task": "token_embed", "input": [[5] * 512] * 2048}, "input", "at most 256 are possible"),
    ],
)
def test_a_task_that_is_not_possible_names_the_field(body: dict[str, Any], param: str, says: str, last: LiveServer) -> None:
    found = last.http.post("/pooling", json={"input": "a", **body})
    error = found.json()["error"]
    assert (found.status_code, error["param"]) == (400, param) and says in error["message"]


def test_a_model_with_a_vector_for_each_token(colbert: LiveServer, expected: Any) -> None:
    """A request need not name the task. Queries are expanded and cut to one length, and some tokens of documents have no vector."""
    theirs = expected["colbert"]
    queries = answer(colbert, "/pooling", input=[QUERY, *TEXTS], prompt_name="query", encoding_format="base64")["data"]
    documents = answer(colbert, "/pooling", input=DOCUMENTS, prompt_name="document", task="token_embed")["data"]
    for found, wanted in ((queries, theirs["queries"]), (documents, theirs["documents"])):
        for entry, vectors_ in zip(found, wanted, strict=True):
            same(rows(entry), vectors_)
    assert [len(rows(one)) for one in queries] == [24] * 4 and len(rows(documents[0])) < 30
    scores = [each["score"] for each in answer(colbert, "/score", **PAIRS)["data"]]
    assert scores == pytest.approx(theirs["scores"], abs=1e-2)
    each = answer(colbert, "/score", text_1=[QUERY] * len(DOCUMENTS), text_2=DOCUMENTS)["data"]
    assert [one["score"] for one in each] == pytest.approx(scores, abs=1e-4)
    ranked = answer(colbert, "/rerank", query=QUERY, documents=DOCUMENTS)["results"]
    assert [one["index"] for one in ranked] == sorted(range(len(scores)), key=lambda i: -scores[i])
    for path, body in (("/v1/embeddings", {}), ("/pooling", {"task": "embed"})):
        refused = colbert.http.post(path, json={"model": model_of(colbert), "input": "a", **body})
        assert refused.status_code == 400 and "a vector for each token, and none for a text" in refused.text


@pytest.mark.whole
def test_what_expands_queries_counts_for_the_size_of_an_answer(folder: Path, tmp_path: Path, start_server: StartServer) -> None:
    shutil.copytree(folder / "colbert", tmp_path / "long")
    expansion = {"strategy": "fixed", "length": 300, "attend": False}
    edit_json(tmp_path / "long/sentence_bert_config.json", {"query_expansion": expansion})
    server = start_server("--max-num-seqs=8", model=str(tmp_path / "long"))
    refused = server.http.post("/pooling", json={"model": model_of(server), "input": ["a"] * 2048, "prompt_name": "query"})
    assert refused.status_code == 400 and "614400 tokens with 24 numbers each would take" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "name", ["pylate", *(pytest.param(one, marks=pytest.mark.whole) for one in ("stanford", "colbert decoder"))]
)
def test_a_script_gets_the_vectors_of_tokens(name: str, folder: Path, expected: Any) -> None:
    theirs, settings = expected[name], dict(SETTINGS)
    if name != "colbert decoder":
        del settings["kv_cache_memory_bytes"]
    with LLM(str(folder / name), **settings) as llm:
        for role, texts, wanted in (("query", [QUERY, *TEXTS], theirs["queries"]), ("document", DOCUMENTS, theirs["documents"])):
            for one, vectors_ in zip(llm.encode(texts, use_tqdm=False, prompt_name=role), wanted, strict=True):
                same(one.outputs.data, vectors_)
        scores = [one.outputs.score for one in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
        assert scores == pytest.approx(theirs["scores"], abs=1e-2)
        with pytest.raises(InvalidRequest, match="a vector for each token") as refusal:
            llm.embed("a")
        assert refusal.value.param == "model"


def dense(entry: Any, size: int) -> list[float]:
    """Returns all numbers of a sparse vector."""
    indices, values = entry["data"]["indices"], entry["data"]["values"]
    assert indices == sorted(set(indices)) and all(values)
    weights = dict(zip(indices, values, strict=True))
    return [weights.get(token, 0.0) for token in range(size)]


@pytest.mark.parametrize(("name", "body"), [("plain", {}), ("query", {"prompt_name": "query", "task": "sparse_embed"})])
def test_sparse_vectors(name: str, body: dict[str, Any], splade: LiveServer, expected: Any) -> None:
    theirs = expected["splade"][name]
    found = answer(splade, "/pooling", input=TEXTS, **body)["data"]
    same([dense(entry, len(theirs[0])) for entry in found], theirs)
    assert 0 < len(found[0]["data"]["indices"]) < len(theirs[0])


def test_scores_of_sparse_vectors_are_their_products(splade: LiveServer, expected: Any) -> None:
    scores = [each["score"] for each in answer(splade, "/score", **PAIRS)["data"]]
    assert scores == pytest.approx(expected["splade"]["scores"], rel=1e-3)
    ranked = answer(splade, "/rerank", query=QUERY, documents=DOCUMENTS)["results"]
    assert [one["index"] for one in ranked] == sorted(range(len(scores)), key=lambda i: -scores[i])
    for path, body, param in (
        ("/v1/embeddings", {}, "model"),
        ("/pooling", {"encoding_format": "base64"}, "encoding_format"),
        ("/pooling", {"dimensions": 8}, "dimensions"),
        ("/pooling", {"normalize": True}, "normalize"),
    ):
        refused = splade.http.post(path, json={"model": model_of(splade), "input": "a", **body})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


def test_an_encoder_gives_vectors_and_scores_alone(encoder: LiveServer, expected: Any) -> None:
    found = answer(encoder, "/score", **PAIRS)
    assert [each["score"] for each in found["data"]] == pytest.approx(expected["encoder"]["scores"], abs=CLOSE)
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/classify", {"input": "a"})):
        refused = encoder.http.post(path, json={"model": model_of(encoder), **body})
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == "model"
    card = encoder.http.get("/v1/models").json()["data"][0]
    assert card["architecture"]["output_modalities"] == ["embeddings"]
    assert "kv_cache_usage_perc" in encoder.http.get("/metrics").text


def test_a_cross_encoder_scores_ranks_and_labels(cross: LiveServer, expected: Any) -> None:
    found = answer(cross, "/score", **PAIRS)
    assert [each["score"] for each in found["data"]] == pytest.approx(expected["cross"]["scores"], abs=CLOSE)
    ranked = answer(cross, "/rerank", query=QUERY, documents=DOCUMENTS)["results"]
    assert [each["index"] for each in ranked] == expected["cross"]["ranked"]
    (label,) = answer(cross, "/classify", input=DOCUMENTS[0])["data"]
    assert (label["label"], label["num_classes"]) == ("LABEL_0", 1)
    (logit,) = answer(cross, "/classify", input=[DOCUMENTS[0]], use_activation=False)["data"]
    assert label["probs"][0] == pytest.approx(sigmoid(logit["probs"][0]))


def test_the_activation_of_scores_is_the_one_that_sentence_transformers_saved(folder: Path) -> None:
    """Release 5.4 and later ones write it beside their prompts, and not into the model's config."""
    path = folder / "cross logits"
    model, encoder = load_model_config(path), PromptEncoder(Tokenizer.load(path), 128)
    scorer = pair_scorer(encoder, no_template, model)
    assert scorer is not None and scorer.scores([[2.5], [-1.0]], None) == [2.5, -1.0]


async def no_template(**_: Any) -> ChatPrompt:
    raise AssertionError("the tokenizer puts pairs together")


def test_a_script_gets_the_scores_of_a_cross_encoder(folder: Path, expected: Any) -> None:
    """The one label is a probability, too. Where two texts meet, they are two segments."""
    with LLM(str(folder / "cross"), **{name: value for name, value in SETTINGS.items() if name != "kv_cache_memory_bytes"}) as llm:
        same([one.outputs.score for one in llm.score(QUERY, DOCUMENTS)], expected["cross"]["scores"])
        logits = [one.outputs.score for one in llm.score(QUERY, DOCUMENTS, use_activation=False)]
        assert logits == pytest.approx(expected["cross"]["logits"], abs=1e-5)
        (cut,) = llm.score(QUERY, [DOCUMENTS[0]], truncate_prompt_tokens=40)
        assert len(cut.prompt_token_ids) == 40
        labelled = [one.outputs.probs for one in llm.classify(TEXTS)]
        assert [len(probs) for probs in labelled] == [1, 1, 1]
        same([one.outputs.data for one in llm.encode(TEXTS, pooling_task="classify")], labelled)  # packed in other steps, perhaps
        for one, theirs in zip(llm.reward(TEXTS, use_activation=False), expected["cross"]["token logits"], strict=True):
            same(one.outputs.data, theirs)
        whole = llm.encode(TEXTS, pooling_task="token_classify")[0].outputs.data
        same(whole, [[sigmoid(one)] for (one,) in expected["cross"]["token logits"][0]])
        with pytest.raises(InvalidRequest, match="vectors") as refusal:
            llm.encode(TEXTS, PoolingParams(pooling="cls"), pooling_task="classify")
        assert refusal.value.param == "pooling_params"
        with pytest.raises(PromptTooLong, match=r"is 128 tokens\. However"):
            llm.embed([5] * 129)
        assert report_of_engine(llm.engine)["kv"] is None
        with pytest.raises(InvalidRequest, match="instruction"):
            llm.score(QUERY, DOCUMENTS, instruction=INSTRUCTION)
        with pytest.raises(InvalidRequest, match="no room"):
            llm.score(QUERY, DOCUMENTS, truncate_prompt_tokens=10)


def test_coheres_types_of_inputs_and_of_vectors(last: LiveServer, expected: Any) -> None:
    for kind, name in (("search_query", "query"), ("search_document", "plain"), ("query", "query"), ("clustering", "plain")):
        found = answer(last, "/v2/embed", texts=TEXTS, input_type=kind, embedding_types=["float", "binary", "ubinary"])[
            "embeddings"
        ]
        same(found["float"], expected["last"][name])
        if name == "query":
            assert (found["binary"], found["ubinary"]) == (expected["last"]["binary"], expected["last"]["ubinary"])
    same(answer(last, "/v2/embed", texts=TEXTS, max_tokens=6)["embeddings"]["float"], expected["last"]["truncated"])
    same(answer(last, "/v2/embed", texts=TEXTS, output_dimension=16)["embeddings"]["float"], expected["last"]["short"])


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("plain", {}),
        ("plain", {"prompt_name": "document"}),
        ("query", {"prompt_name": "query"}),
        ("short", {"dimensions": 16}),
        ("truncated", {"truncate_prompt_tokens": 6}),
        ("plain", {"truncate_prompt_tokens": -1, "truncation_side": "left"}),
        ("plain", {"path": "/pooling", "task": "embed"}),
    ],
)
def test_vectors_of_a_model_like_qwen3_embedding(name: str, body: dict[str, Any], last: LiveServer, expected: Any) -> None:
    same(vectors(last, **body), expected["last"][name])


def test_vectors_are_the_same_as_token_ids_and_through_openais_client(last: LiveServer, expected: Any) -> None:
    ids = [answer(last, "/tokenize", prompt=text)["tokens"] for text in TEXTS]
    same(vectors(last, input=ids), expected["last"]["plain"])
    client = openai.OpenAI(base_url=f"{last.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    found = client.embeddings.create(model=model, input=TEXTS, dimensions=16)
    same([entry.embedding for entry in found.data], expected["last"]["short"])


def test_a_truncated_prompt_has_its_first_or_last_tokens_and_those_around_it(last: LiveServer) -> None:
    text = TEXTS[1]
    ids = answer(last, "/tokenize", prompt=text)["tokens"]
    for side, kept in (("right", [*ids[:4], ids[-1]]), ("left", ids[-5:])):
        cut = vectors(last, input=text, truncate_prompt_tokens=5, truncation_side=side)
        same(cut, vectors(last, input=kept))


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("plain", {}),
        ("query", {"prompt_name": "query", "path": "/pooling"}),
        ("cut", {"truncate_prompt_tokens": CUT}),
        ("cut query", {"truncate_prompt_tokens": CUT, "prompt_name": "query"}),
    ],
)
def test_vectors_of_texts_that_go_through_a_chat_template(
    name: str, body: dict[str, Any], messages: LiveServer, expected: Any
) -> None:
    same(vectors(messages, **body), expected["messages"][name])


def test_scores_of_texts_that_go_through_a_chat_template(messages: LiveServer, expected: Any) -> None:
    same([entry["score"] for entry in answer(messages, "/score", **PAIRS)["data"]], expected["messages"]["scores"])
    counts = [answer(messages, "/v1/embeddings", input=text)["usage"]["prompt_tokens"] for text in ("x", "x<|im_end|>")]
    assert counts[1] > counts[0] + 1, "a text spelled a control token, and it became one"


def test_a_tail_without_room_for_a_text_is_refused(messages: LiveServer) -> None:
    body = {"model": model_of(messages), "input": TEXTS, "truncate_prompt_tokens": 3}
    found = messages.http.post("/v1/embeddings", json=body)
    assert found.status_code == 400 and found.json()["error"]["param"] == "truncate_prompt_tokens"


async def test_a_checkpoint_may_drop_the_tail_of_what_is_cut(folder: Path, expected: Any) -> None:
    tokenizer = Tokenizer.load(folder / "without tail")

    async def render(**job: Any) -> ChatPrompt:
        return tokenizer.renderer.render(**job)

    texts = PooledTexts(PromptEncoder(tokenizer, 512), render, load_model_config(folder / "without tail").pooler)
    form = PromptForm(texts.special_tokens, truncation=Truncation(CUT), room=0)
    assert await texts.ids(TEXTS[1], "input", form) == expected["messages"]["ids without tail"]


def test_a_script_gets_the_vectors_and_scores_of_a_chat_model_with_a_prompt_of_its_own(folder: Path, expected: Any) -> None:
    theirs = expected["mean"]
    with LLM(str(folder / "mean"), **SETTINGS) as llm:
        same([one.outputs.embedding for one in llm.embed(TEXTS, use_tqdm=False)], theirs["plain"])
        same([one.outputs.data for one in llm.encode(TEXTS, use_tqdm=False, prompt_name="document")], theirs["document"])
        found = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
        same([[one.outputs.score for one in found]], [theirs["scores"]])
        each = llm.score([QUERY] * len(DOCUMENTS), DOCUMENTS, use_tqdm=False)
        same([[one.outputs.score for one in each]], [theirs["scores"]])
        ids = [one.prompt_token_ids for one in llm.embed([QUERY, DOCUMENTS[0]], use_tqdm=False)]
        assert found[0].prompt_token_ids == ids[0] + ids[1]
        cut = llm.embed([TEXTS[1], {"prompt_token_ids": [5] * 9}], use_tqdm=False, truncate_prompt_tokens=4)
        assert [len(one.prompt_token_ids) for one in cut] == [4, 4]
        assert llm.chat(CHAT["messages"], use_tqdm=False)[0].outputs[0].token_ids
        refused: list[tuple[Callable[[], object], str]] = [
            (lambda: llm.score([], DOCUMENTS), "queries"),
            (lambda: llm.score(TEXTS, DOCUMENTS), "documents"),
            (lambda: llm.score(QUERY, DOCUMENTS, instruction="a"), "instruction"),
            (lambda: llm.score(QUERY, DOCUMENTS, use_activation=False), "use_activation"),
            (lambda: llm.embed("a", prompt_name="passage"), "prompt_name"),
            (lambda: llm.embed([5, 6], prompt_name="query"), "prompt_name"),
            (lambda: llm.encode("a", truncate_prompt_tokens=0), "truncate_prompt_tokens"),
            (lambda: llm.encode("a", pooling_task="score"), "pooling_task"),  # type: ignore[arg-type]
            (lambda: llm.embed("a", PoolingParams(task="token_embed")), "pooling_params"),
            (lambda: llm.reward("a"), "model"),
            (lambda: llm.encode("a", PoolingParams(task="token_classify")), "pooling_params"),
            (lambda: llm.classify("a"), "model"),
        ]
        for call, param in refused:
            with pytest.raises(InvalidRequest) as refusal:
                call()
            assert refusal.value.param == param


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
@pytest.mark.parametrize(
    ("fields", "as_tokens"),
    [
        ({}, {"add_generation_prompt": False}),
        ({"add_generation_prompt": True}, {}),
        ({"continue_final_message": True}, {"continue_final_message": True, "add_generation_prompt": False}),
        ({"add_special_tokens": True}, {"add_special_tokens": True, "add_generation_prompt": False}),
    ],
)
def test_vectors_of_a_chat_are_those_of_its_tokens(path: str, fields: Any, as_tokens: Any, last: LiveServer) -> None:
    messages = [{"role": "user", "content": QUERY}, {"role": "assistant", "content": "<|im_end|> is text"}]
    tokens = answer(last, "/tokenize", messages=messages, **as_tokens)["tokens"]
    ours = vectors(last, path, input=None, messages=messages, **fields)
    same(ours, vectors(last, input=tokens))
    cut = vectors(last, path, input=None, messages=messages, truncate_prompt_tokens=8, **fields)
    same(cut, vectors(last, input=tokens[:8]))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", {**CHAT, "max_tokens": 1}),
        ("/v1/responses", {"input": "a"}),
    ],
)
@pytest.mark.parametrize(
    ("name", "routes"),
    [
        ("last", ["/v1/embeddings", "/pooling", "/score", "/rerank"]),
        ("encoder", ["/v1/embeddings", "/pooling", "/score", "/rerank"]),
        ("cross", ["/classify", "/score", "/rerank"]),
        ("colbert", ["/pooling", "/score", "/rerank"]),
        ("splade", ["/pooling", "/score", "/rerank"]),
    ],
)
def test_who_asks_a_model_without_such_a_head_for_tokens_is_told_its_routes(
    name: str, routes: list[str], path: str, body: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    server: LiveServer = request.getfixturevalue(name)
    found = server.http.post(path, json=body)
    assert found.status_code == 400 and "no head that gives tokens" in found.text
    assert sorted(re.findall(r"/[a-z0-9]+(?:/[a-z]+)?", found.json()["error"]["message"])) == sorted(routes)


@pytest.mark.parametrize(
    ("name", "says"),
    [("dense", "Dense"), ("max", "['max']"), ("two", "one at a time"), ("prompt", "include_prompt")],
)
def test_the_reason_why_a_checkpoint_gives_no_vectors(name: str, says: str, folder: Path) -> None:
    fault = load_model_config(folder / name).pooler.fault
    assert fault is not None and says in fault


def test_a_model_with_a_layer_that_is_not_here_gives_tokens_and_no_vectors(folder: Path) -> None:
    with LLM(str(folder / "dense"), **SETTINGS) as llm:
        assert llm.chat(CHAT["messages"], use_tqdm=False)[0].outputs[0].token_ids
        refused: list[Callable[[], object]] = [lambda: llm.embed("a"), lambda: llm.score(QUERY, DOCUMENTS)]
        for call in refused:
            with pytest.raises(InvalidRequest, match=r"Dense module has activation_function .* not supported"):
                call()


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")])
def test_scores_of_vectors_are_their_cosines(path: str, names: tuple[str, str], last: LiveServer, expected: Any) -> None:
    found = answer(last, path, **dict(zip(names, (QUERY, DOCUMENTS), strict=True)))
    assert [(entry["index"], entry["object"]) for entry in found["data"]] == [(i, "score") for i in range(len(DOCUMENTS))]
    same([entry["score"] for entry in found["data"]], expected["last"]["scores"])
    one_to_one = answer(last, path, **dict(zip(names, ([QUERY] * len(DOCUMENTS), DOCUMENTS), strict=True)))
    same([entry["score"] for entry in one_to_one["data"]], expected["last"]["scores"])


@pytest.mark.parametrize(
    ("name", "body"),
    [("scores", {}), ("logits", {"use_activation": False}), ("instructed", {"instruction": INSTRUCTION})],
)
def test_scores_of_a_reranker(name: str, body: dict[str, Any], reranker: LiveServer, expected: Any) -> None:
    for _ in range(2):  # the second time from the prefix cache
        found = answer(reranker, "/score", **PAIRS, **body)
        same([entry["score"] for entry in found["data"]], expected["reranker"][name])
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_ranks_documents(path: str, reranker: LiveServer, expected: Any) -> None:
    found = answer(reranker, path, query=QUERY, documents=[{"text": DOCUMENTS[0]}, *DOCUMENTS[1:]])
    best = expected["reranker"]["ranked"]
    assert [result["index"] for result in found["results"]] == best
    assert [result["document"]["text"] for result in found["results"]] == [DOCUMENTS[i] for i in best]
    same([result["relevance_score"] for result in found["results"]], [expected["reranker"]["scores"][i] for i in best])
    first = answer(reranker, path, query=QUERY, documents=DOCUMENTS, top_n=1, return_documents=False)["results"]
    assert [result.keys() for result in first] == [{"index", "relevance_score"}] and first[0]["index"] == best[0]


def test_the_first_checkpoints_of_a_reranker_need_an_argument(folder: Path, expected: Any) -> None:
    theirs = expected["reranker"]
    forms: list[tuple[dict[str, Any], str]] = [
        ({}, "scores"),
        ({"use_activation": False}, "logits"),
        ({"instruction": INSTRUCTION}, "instructed"),
    ]
    with LLM(str(folder / "original"), classifier_from_token="False,True", **SETTINGS) as llm:
        for fields, name in forms:
            found = llm.score(QUERY, DOCUMENTS, use_tqdm=False, **fields)
            same([[one.outputs.score for one in found]], [theirs[name]])
        assert all(one.num_cached_tokens for one in llm.score(QUERY, DOCUMENTS, use_tqdm=False))
        long = llm.score(QUERY, DOCUMENTS[0] + " and so on" * 600, use_tqdm=False, truncate_prompt_tokens=-1)
        assert 500 < len(long[0].prompt_token_ids) <= 512
        with pytest.raises(PromptTooLong) as refusal:
            llm.score(QUERY, ["a", "b " * 600])
        assert refusal.value.param == "documents[1]"
        assert llm.chat(CHAT["messages"], use_tqdm=False)[0].outputs[0].token_ids


def test_a_long_query_counts_for_each_document(reranker: LiveServer) -> None:
    refused = reranker.http.post("/rerank", json={"query": QUERY * 10, "documents": ["a"] * 100})
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == "documents" and "more than 4096 tokens" in error["message"]


def test_documents_are_cut_at_their_end(reranker: LiveServer) -> None:
    whole = answer(reranker, "/score", text_1=QUERY, text_2=DOCUMENTS[0])
    long = DOCUMENTS[0] + " and so on" * 300
    most = whole["usage"]["prompt_tokens"]
    cut = answer(reranker, "/score", text_1=QUERY, text_2=long, truncate_prompt_tokens=most)
    assert most - 2 <= cut["usage"]["prompt_tokens"] <= most
    ids = reranker.http.post("/tokenize", json={"prompt": DOCUMENTS[0], "add_special_tokens": False}).json()["tokens"]
    cut = answer(reranker, "/score", text_1=QUERY, text_2=long, max_tokens_per_doc=len(ids))
    assert cut["usage"]["prompt_tokens"] <= most + 1
    refused = reranker.http.post("/score", json={"text_1": QUERY, "text_2": long, "truncate_prompt_tokens": 20})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"path": "/v1/embeddings", "input": "a", "dimensions": 0}, "dimensions", "16, 32, 64"),
        ({"path": "/v1/embeddings", "input": "a", "dimensions": 24}, "dimensions", "16, 32, 64"),
        ({"path": "/v1/embeddings", "input": "a", "prompt_name": "passage"}, "prompt_name", "possible: document, query"),
        ({"path": "/v1/embeddings", "input": [5, 6], "prompt_name": "query"}, "prompt_name", "token ids"),
        ({"path": "/v1/embeddings", "input": [], "prompt_name": "query"}, "input", "is empty"),
        ({"path": "/v2/embed", "texts": [], "input_type": "search_query"}, "texts", "is empty"),
        ({"path": "/v1/embeddings", "input": "a", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens", "-1 or in [2, 512]"),
        ({"path": "/score", "text_1": "a", "text_2": "b", "instruction": "c"}, "instruction", "no reranker"),
        ({"path": "/score", "text_1": "a", "text_2": "b", "use_activation": False}, "use_activation", "cosines"),
        ({"path": "/score", "text_1": "a", "text_2": ["b", "c " * 600]}, "text_2[1]", "maximum context length"),
    ],
)
def test_what_this_model_cannot_do(body: dict[str, Any], param: str, says: str, last: LiveServer) -> None:
    found = last.http.post(body.pop("path"), json=body)
    error = found.json()["error"]
    assert (found.status_code, error["param"]) == (400, param) and says in error["message"]


def test_a_document_cannot_open_a_turn(reranker: LiveServer) -> None:
    spelled = answer(reranker, "/score", text_1=QUERY, text_2="x<|im_end|>")["usage"]["prompt_tokens"]
    assert spelled > answer(reranker, "/score", text_1=QUERY, text_2="x")["usage"]["prompt_tokens"] + 1


def test_a_pair_that_is_too_long_is_refused_by_its_document(reranker: LiveServer) -> None:
    found = reranker.http.post("/rerank", json={"query": QUERY, "documents": ["a", "b " * 600]}).json()["error"]
    assert found["param"] == "documents[1]" and found["code"] == "context_length_exceeded"


async def test_a_prompt_that_the_engine_cannot_hold_is_refused_by_its_field() -> None:
    """The KV cache may hold less than the model's length, which is all that the routes know."""
    async with running(max_model_len=64) as engine:
        with pytest.raises(PromptTooLong, match="the KV cache considered") as refusal:
            check_prompts(engine, {"query": [[5]], "documents": [[5], [5] * 65]}, PoolingParams())
    assert refusal.value.param == "documents"
