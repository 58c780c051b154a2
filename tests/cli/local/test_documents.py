"""Files of several documents."""

import pytest
from starling_cli.local.documents import DocumentError, objects_of_kind, one_service, parse_documents, read_documents

TWO = """
kind: InferenceService
metadata: {name: one}
---
kind: Secret
metadata: {name: s}
---
---
kind: InferenceService
metadata: {name: two}
"""


def parsed(text):
    return list(parse_documents(text, "file.yaml"))


def test_each_has_its_location():
    assert [document.name for document in parsed(TWO)] == ["one", "s", "two"]
    assert parsed(TWO)[2].location == "file.yaml (document 4, InferenceService two)"


def test_a_list_stands_for_its_items():
    assert [document.name for document in parsed("kind: List\nitems: [{kind: A, metadata: {name: x}}, {kind: B}]")] == ["x", ""]


@pytest.mark.parametrize("text", ["a: [", "- 1", "just words", "1"])
def test_what_is_no_object(text):
    with pytest.raises(DocumentError, match=r"file.yaml"):
        parsed(text)


def test_one_is_chosen_by_name():
    assert one_service(parsed(TWO), "f", "two").name == "two"
    for name, cause in ((None, "pick one with --name"), ("three", "it has: one, two")):
        with pytest.raises(DocumentError, match=cause):
            one_service(parsed(TWO), "f", name)


def test_a_file_without_a_service():
    with pytest.raises(DocumentError, match="no document of kind"):
        one_service(parsed("kind: Pod"), "f", None)


def test_objects_by_kind():
    assert list(objects_of_kind(parsed(TWO), "Secret")) == ["s"]


def test_a_file_that_cannot_be_read(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("none", "binary", "."):
        with pytest.raises(DocumentError, match="cannot be read"):
            read_documents(tmp_path / name)
