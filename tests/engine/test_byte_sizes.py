"""Sizes as people write them."""

import pytest
from starling_engine.byte_sizes import parse_bytes, parse_length


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 * 2**30),
        ("4Gi", 4 * 2**30),
        ("512MiB", 512 * 2**20),
        ("500MB", 500_000_000),
        ("1.5G", 1_500_000_000),
        ("1TiB", 2**40),
        ("1000", 1000),
        ("2 kib", 2048),
        ("7b", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "4XB", "4 Gi B", "0x10", "1e9"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="like 4GiB"):
        parse_bytes(text)


def test_lengths_have_the_letters_of_vllm() -> None:
    texts = {"32768": 32768, "32k": 32000, "32K": 32768, "1m": 10**6, "1M": 2**20}
    assert {text: parse_length(text) for text in texts} == texts
    for wrong in ("", "k", "-1", "1.5K", "32kb"):
        with pytest.raises(ValueError, match=r"32k \(32000\)"):
            parse_length(wrong)
