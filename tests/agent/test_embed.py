"""Cohere's /v2/embed: the vectors of /v1/embeddings, in the types that a request names."""

import base64
import struct
from typing import Any

import pytest
from starling_agent.openai.vector_types import check_types, vectors_by_type
from starling_engine.errors import InvalidRequest, RequestFailed

TEXTS = ["What does len() do?", "It returns the number of items."]


def embedded(http: Any, **body: Any) -> Any:
    answer = http.post("/v2/embed", json={"texts": TEXTS, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_answer_has_coheres_form(http):
    answer = embedded(http, input_type="search_document", truncate="END", priority=0)
    listed = http.post("/v1/embeddings", json={"input": TEXTS}).json()
    assert answer["embeddings"].keys() == {"float"}
    for vector, entry in zip(answer["embeddings"]["float"], listed["data"], strict=True):
        assert vector == pytest.approx(entry["embedding"], abs=1e-3)
    tokens = listed["usage"]["prompt_tokens"]
    meta = answer["meta"]
    assert (meta["api_version"], meta["billed_units"], meta["tokens"]) == (
        {"version": "2"},
        {"input_tokens": tokens},
        {"input_tokens": tokens},
    )
    assert (answer["response_type"], answer["texts"], list(answer)[-1]) == ("embeddings_by_type", TEXTS, "usage")


def test_types_are_of_the_same_vectors(http):
    found = embedded(http, embedding_types=["float", "int8", "uint8", "binary", "ubinary", "base64"])["embeddings"]
    assert found.keys() == {"float", "int8", "uint8", "binary", "ubinary", "base64"}
    vector = found["float"][0]
    assert struct.unpack(f"<{len(vector)}f", base64.b64decode(found["base64"][0])) == pytest.approx(vector, abs=1e-6)
    largest = max(map(abs, vector))
    assert max(map(abs, found["int8"][0])) == 127
    assert [value * largest / 127 for value in found["int8"][0]] == pytest.approx(vector, abs=largest / 250)
    assert found["uint8"][0] == [value + 128 for value in found["int8"][0]]
    bits = "".join(f"{byte:08b}" for byte in found["ubinary"][0])
    assert bits == "".join(str(int(value > 0)) for value in vector)
    assert found["binary"][0] == [byte - 128 for byte in found["ubinary"][0]]


def test_inputs_are_texts_in_another_form(http):
    inputs = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    answer = http.post("/v2/embed", json={"inputs": inputs, "images": [], "embedding_types": ["int8"]}).json()
    assert (
        answer["texts"] == TEXTS and answer["embeddings"]["int8"] == embedded(http, embedding_types=["int8"])["embeddings"]["int8"]
    )


def test_inputs_are_cut_at_the_end_unless_it_is_said_otherwise(http):
    def tokens(**body: Any) -> int:
        return embedded(http, **body)["usage"]["prompt_tokens"]

    assert tokens(texts=["word " * 6000]) == 4096
    whole = tokens(texts=["a b c d"])
    assert (tokens(texts=["a b c d"], max_tokens=3), tokens(texts=["a b c d"], max_tokens=9999)) == (3, whole)
    assert tokens(texts=["a b c d"], max_tokens=whole, truncate="NONE") == whole
    ends = [embedded(http, texts=[text], truncate="START", max_tokens=2)["embeddings"]["float"] for text in ("a b c d", "x y c d")]
    begins = [embedded(http, texts=[text], max_tokens=2)["embeddings"]["float"] for text in ("a b c d", "a b x y")]
    assert ends[0][0] == pytest.approx(ends[1][0], abs=1e-5) and begins[0][0] == pytest.approx(begins[1][0], abs=1e-5)
    assert ends[0][0] != pytest.approx(begins[0][0], abs=1e-3)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"texts": None}, "texts", "give one of texts and inputs"),
        ({"inputs": []}, "inputs", "give one of texts and inputs"),
        ({"texts": []}, "texts", "empty"),
        ({"texts": ["a", ""], "truncate": "NONE", "max_tokens": 0}, "max_tokens", "at least 1"),
        ({"texts": ["a", "b c d e"], "truncate": "NONE", "max_tokens": 3}, "texts[1]", "tokens, and max_tokens is 3"),
        ({"texts": ["word " * 6000], "truncate": "NONE"}, "texts[0]", "maximum context length"),
        ({"truncate": "MIDDLE"}, "truncate", ""),
        ({"output_dimension": 100_000}, "output_dimension", "must be"),
        ({"input_type": "image"}, "input_type", "images"),
        ({"input_type": "poem"}, "input_type", "no prompt of this model"),
        ({"images": ["data:image/png;base64,AAAA"]}, "images", "images"),
        ({"priority": 3}, "priority", "order of arrival"),
        ({"output_dimension": 12, "embedding_types": ["float", "binary"]}, "embedding_types", "multiple of 8"),
        ({"embedding_types": []}, "embedding_types", ""),
        ({"embedding_types": ["int4"]}, "embedding_types[0]", ""),
        ({"texts": None, "inputs": ["a"]}, "inputs[0]", "one text"),
        (
            {"texts": None, "inputs": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "inputs[0].content[0].type",
            "images",
        ),
    ],
)
def test_what_is_not_possible_is_refused_by_name(http, fields, param, words):
    body = {name: value for name, value in ({"texts": TEXTS} | fields).items() if value is not None}
    answer = http.post("/v2/embed", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert words in error["message"]


def test_bits_need_whole_bytes():
    with pytest.raises(InvalidRequest, match="multiple of 8") as refusal:
        check_types(["float", "ubinary"], 12)
    assert refusal.value.param == "embedding_types"
    check_types(["float", "int8"], 12)
    assert vectors_by_type([[0.0] * 8], ["int8", "binary"]).int8 == [[0] * 8]


@pytest.mark.parametrize("kind", ["int8", "uint8", "binary", "ubinary"])
def test_what_is_not_a_number_is_told_where_a_type_has_no_value_for_it(kind):
    vectors = [[0.5] * 8, [float("nan")] * 8]
    with pytest.raises(RequestFailed, match="the vector of input 1 has what is not a number"):
        vectors_by_type(vectors, ["float", kind])
    assert vectors_by_type(vectors, ["float", "base64"]).float_ == vectors
