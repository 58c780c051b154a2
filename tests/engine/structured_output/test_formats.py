"""All that the grammar of a format can write is valid for a validator that others wrote."""

import json
import random

import jsonschema_rs
import llguidance
import pytest
from starling_engine.structured_output import json_grammar
from starling_engine.structured_output.formats import POSSIBLE

from tests.engine.structured_output.matching import TOKENIZER, Matcher

END, QUOTE = 256, ord('"')


def written(grammar: str, length: int, draw: random.Random) -> str | None:
    """A string that the grammar writes by random bytes, which ends as soon as it may when it is long; None if it never does."""
    matcher = llguidance.LLMatcher(TOKENIZER, grammar, log_level=0)
    text = b""
    while len(text) < 4 * length:
        mask = matcher.compute_bitmask()
        allowed = [byte for byte in range(257) if mask[byte // 8] >> byte % 8 & 1]
        if END in allowed:
            return json.loads(text)
        byte = QUOTE if QUOTE in allowed and len(text) > length else draw.choice(allowed)
        matcher.consume_token(byte)
        text += bytes([byte])
    return None


@pytest.mark.parametrize("name", POSSIBLE)
def test_strings_of_a_format_are_valid(name: str) -> None:
    schema = {"type": "string", "format": name}
    judge = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    draw = random.Random(name)
    texts = [written(json_grammar(schema), length, draw) for length in (5, 20, 60, 120) for _ in range(5)]
    assert any(text is not None for text in texts)
    assert [text for text in texts if text is not None and not judge.is_valid(text)] == []


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("date", ["2024-02-29", "2000-02-29"], ["2023-02-29", "1900-02-29", "2024-04-31"]),
        ("time", ["23:59:59Z", "00:00:00.5+01:00"], ["24:00:00Z", "12:00:60Z", "12:00:00"]),
        ("date-time", ["2024-02-29t00:00:00z"], ["2023-02-29T00:00:00Z", "2024-02-29 00:00:00Z"]),
        ("hostname", ["a.b", "a-b", "x" * 63], ["-a", "a-", "xn--a", "x" * 64, ".".join(["a" * 50] * 5)]),
        ("email", ["a.b+c@x.y", "a" * 64 + "@b"], ["@b", "a@", "a..b@c", "a" * 65 + "@b"]),
        ("uri-reference", ["a/b?c#d", "//x/y", "", "https://a"], ["a b", "\\a", "%zz"]),
        ("json-pointer", ["", "/a~0b"], ["a", "/~2"]),
        ("uuid4", ["123e4567-e89b-42d3-a456-426614174000"], ["123e4567-e89b-12d3-a456-426614174000"]),
        ("byte", ["", "YQ=="], ["YQ=", "Y"]),
    ],
)
def test_a_format_is_exact(name: str, valid: list[str], invalid: list[str]) -> None:
    matcher = Matcher({"type": "string", "format": name})
    assert [text for text in valid if not matcher.accepts(text)] == []
    assert [text for text in invalid if matcher.accepts(text)] == []
