"""Sources of weights."""

import pytest
from starling_operator.plan.source import parse_source


@pytest.mark.parametrize(
    ("text", "url", "claim"),
    [
        ("hf://org/name", "hf://org/name", None),
        ("hf://org/name@main", "hf://org/name@main", None),
        ("hf://org/name:a/b-Q4_0.gguf@main", "hf://org/name:a/b-Q4_0.gguf@main", None),
        ("hf://org/name@refs/pr/3", "hf://org/name@refs/pr/3", None),
        ("hf://Org-1/na.me_2@0a1b2c", "hf://Org-1/na.me_2@0a1b2c", None),
        ("file:///models/chat", "file:///models/chat", None),
        ("file:///", "file:///", None),
        ("pvc://weights/chat", "file:///models/chat", "weights"),
        ("pvc://weights/a/b/c", "file:///models/a/b/c", "weights"),
        ("pvc://weights/a/", "file:///models/a", "weights"),
        ("pvc://weights/", "file:///models", "weights"),
        ("pvc://weights", "file:///models", "weights"),
        ("pvc://my-claim.v2/x", "file:///models/x", "my-claim.v2"),
        ("pvc://weights/./a//b", "file:///models/a/b", "weights"),
    ],
)
def test_a_claim_is_mounted_and_the_rest_is_as_written(text: str, url: str, claim: str | None) -> None:
    source = parse_source(text)
    assert (source.url, source.claim) == (url, claim)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "org/name",
        "/models/chat",
        "s3://bucket/name",
        "hf:org/name",
        "hf://name",
        "hf://org/name/more",
        "hf://org/name@",
        "hf://org/name:file",
        "hf://org/na me",
        "HF://org/name",
        "file://models/chat",
        "pvc://",
        "pvc:///path",
        "pvc://Claim/path",
        "pvc://-claim/path",
        "pvc://claim/../secret",
        "pvc://claim/a/../../b",
    ],
)
def test_anything_else_is_refused_with_what_is_possible(text: str) -> None:
    with pytest.raises(ValueError, match=r"^model\.source: .*(hf://|pvc://|claim)"):
        parse_source(text)
