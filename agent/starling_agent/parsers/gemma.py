"""Gemma's calls: `call:name{key:<|"|>text<|"|>,other:[1,true]}`. Strings have marks of their own, and keys none."""

import json
import re

from starling_agent.parsers.json_text import literal
from starling_agent.parsers.reading import Reading
from starling_agent.parsers.source import Markers, Reader

OPENS, CLOSES, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_NAME = re.compile(r"[\w.\-]+")
_STRUCTURE = Markers("{", "}", "[", "]", ",", QUOTE, CLOSES)
_KEY = Markers(":", "}", CLOSES)
_QUOTE = Markers(QUOTE)
_CLOSING = {"{": "}", "[": "]"}


def gemma_call(reading: Reading, opening: str) -> Reader[None]:
    """Reads a call up to its closing marker."""
    source, output = reading.source, reading.output
    source.keep()
    if not (yield from source.try_read("call:")):
        reading.give_back(opening)
        return
    name = yield from source.word(_NAME)
    if not name or (yield from source.next_character()) != "{":
        reading.give_back(opening)
        return
    source.kept()
    output.begin_call(name)
    if (yield from _arguments(reading)):
        yield from source.try_close(CLOSES)
    output.end_call()


def _arguments(reading: Reading) -> Reader[bool]:
    """Reads the object, and writes it as JSON. Returns False where the call ended before."""
    source, output = reading.source, reading.output
    brackets: list[str] = []
    while True:
        text, marker = yield from source.text_until(_STRUCTURE)
        if text.strip():
            output.arguments(_constant(text.strip()))
        if marker is None or marker == CLOSES:
            return False
        if marker in "}]":
            if not brackets or _CLOSING[brackets.pop()] != marker:
                return False
            output.arguments(marker)
            if not brackets:
                return True
            continue
        if marker == QUOTE:
            output.arguments('"')
            if (yield from source.until(_QUOTE, output.text_argument)) is None:
                return False
            output.arguments('"')
            continue
        output.arguments(marker)
        if marker in "{[":
            brackets.append(marker)
        if brackets[-1] == "{" and (yield from source.next_character()) != "}":
            key, marker = yield from source.text_until(_KEY)
            if marker != ":":
                return False
            output.arguments(f"{json.dumps(key.strip(), ensure_ascii=False)}: ")


def _constant(text: str) -> str:
    """Returns a number or constant as it is, and what is none as text."""
    return literal(text) or json.dumps(text, ensure_ascii=False)
