"""Sizes as people write them: 4GiB, 500MB, 1.5G, or plain bytes; and lengths in tokens: 32k, 128K, 1M."""

import re

_LETTERS = "kmgt"
_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}{b}": 1000**power for power, letter in enumerate(_LETTERS, 1) for b in ("", "b")}
_UNITS |= {f"{letter}i{b}": 1024**power for power, letter in enumerate(_LETTERS, 1) for b in ("", "b")}
_LENGTHS = {"": 1, "k": 1000, "m": 1000**2, "K": 1024, "M": 1024**2}
_LENGTH = re.compile(r"(\d+)([kmKM]?)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")


def parse_bytes(text: str) -> int:
    """Returns whole bytes, rounded down; letters in either case. Raises ValueError with the form."""
    match = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is no size; write it like 4GiB, 512MiB or 1000000")
    return int(float(match[1]) * factor)


def parse_length(text: str) -> int:
    """Returns tokens, with the letters of vLLM: k is 1000, K is 1024, and so m and M. Raises ValueError with the form."""
    match = _LENGTH.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no length; write it like 32768, 32k (32000) or 32K (32768)")
    return int(match[1]) * _LENGTHS[match[2]]


def format_bytes(size: int) -> str:
    """Returns a number of bytes as people read it, in GiB or MiB."""
    return f"{size / (1 << 30):.2f} GiB" if abs(size) >= 1 << 30 else f"{size / (1 << 20):.2f} MiB"
