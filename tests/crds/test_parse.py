"""Problems that are found without an API server: paths, given values, all at once."""

import pytest
from starling_crds.parse import parse
from starling_crds.quantity import parse_quantity

from tests.crds.manifests import service


def problems_in(body: dict[str, object]) -> list[str]:
    return [str(problem) for problem in parse(body).problems]


def test_a_good_manifest_gives_a_spec():
    parsed = parse(service({"engine.blockSize": 8}))
    assert parsed.error is None
    assert parsed.spec is not None
    assert parsed.spec.engine.block_size == 8


def test_all_problems_are_reported_at_once():
    body = service({"engine.blockSize": 12, "replicas": "two", "model.servedNames": ["a", "a"]}, name="Chat")
    assert problems_in(body) == [
        "metadata.name: must be at most 40 lowercase letters, digits and '-', begin with a letter and end with a letter or digit,"
        ' got "Chat"',
        "spec.model.servedNames: must name each model once; remove what is there twice",
        'spec.replicas: must be a whole number, got "two"',
        "spec.engine.blockSize: must be 8, 16 or 32, got 12",
    ]


def test_an_unknown_field_is_reported_with_the_known_ones():
    assert problems_in(service({"accelerators.count": 2})) == ["spec.accelerators.count: unknown field; possible are type, perNode"]


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ({"apiVersion": "v1"}, "apiVersion: must be serving.starling.dev/v1alpha1, got v1"),
        ({"kind": "Service"}, "kind: must be InferenceService, got Service"),
        ({"metadata": {}}, "metadata.name: is required"),
        ({"specs": {}}, "specs: unknown field; possible are apiVersion, kind, metadata, spec, status"),
        ({"spec": None}, "spec: is required, and must be a map"),
        ({"spec": {"model": None}}, "spec.model: is required"),
    ],
)
def test_what_is_no_inference_service(change: dict[str, object], first: str):
    assert problems_in(service() | change)[0] == first


def test_python_names_are_no_names_of_the_api():
    assert problems_in(service({"kv_cache": {}}))[0].startswith("spec.kv_cache: unknown field")


@pytest.mark.parametrize(("text", "size"), [("4Gi", 4 * 2**30), ("500M", 500_000_000), ("1.5Ki", 1536), ("7", 7), ("0.1k", 100)])
def test_sizes(text: str, size: int):
    assert parse_quantity(text) == size


@pytest.mark.parametrize("text", ["", "4GB", "Gi", "-1", "1e3", "4Gi\n"])
def test_what_is_no_size(text: str):
    with pytest.raises(ValueError, match="is not a size"):
        parse_quantity(text)
