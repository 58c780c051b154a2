"""Feeds outputs to parsers in any pieces, and collects what comes."""

import gc
import random
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from starling_agent.parsers.events import Arguments, CallBegin, CallEnd, Content, Event, Reasoning
from starling_agent.parsers.families import FAMILIES
from starling_agent.parsers.parser import OutputParser

Piece = tuple[str, list[int]]
"""A text, and the offsets in it where tokens begin that are markers."""


NO_TOOLS: dict[str, Any] = {}
"""Tools that have no schemas."""


class Parsed(NamedTuple):
    content: str
    reasoning: str
    calls: list[tuple[str, str]]
    whole: int
    """Calls that have an end."""


def nothing_is_spelled(_marker: str, _start: int) -> bool:
    return False


def tokens_of(text: str, markers: Collection[str], spells: Callable[[str, int], bool] = nothing_is_spelled) -> list[Piece]:
    """Splits a text as a tokenizer might: markers are tokens, except those that a model `spells`, and the rest is short pieces."""
    draw = random.Random(7)
    found = re.finditer("|".join(map(re.escape, sorted(markers, key=len, reverse=True))), text) if markers else iter(())
    pieces: list[Piece] = []
    at = 0
    for match in found:
        if not spells(match.group(), match.start()):
            pieces += [*_short(text[at : match.start()], draw), (match.group(), [0])]
            at = match.end()
    return [*pieces, *_short(text[at:], draw)]


def groups(pieces: Sequence[Piece], sizes: Iterator[int]) -> Iterator[Piece]:
    """Joins pieces, as many as the sizes say in turn."""
    at = 0
    while at < len(pieces):
        text, offsets = "", []
        for piece, tokens in pieces[at : (at := at + next(sizes))]:
            offsets += [len(text) + offset for offset in tokens]
            text += piece
        yield text, offsets


def equal_pieces(text: str) -> list[Piece]:
    """Splits a text so that what repeats in it is cut at all places."""
    return [(text[at : at + 29], []) for at in range(0, len(text), 29)]


def assert_linear(work: Callable[[int], object], size: int) -> None:
    """Checks that four times the size takes less than eight times as long; what is quadratic takes sixteen times."""
    for _ in range(3):  # a busy machine may slow one of them down
        quarter, whole = _seconds(work, size // 4), _seconds(work, size)
        if whole < max(8 * quarter, 0.01):
            return
    raise AssertionError(f"{size // 4} characters took {quarter:.3f} s, {size} took {whole:.3f} s")


def _seconds(work: Callable[[int], object], size: int) -> float:
    gc.disable()  # it looks at all events again while they are collected here
    try:
        began = time.process_time()
        work(size)
        return time.process_time() - began
    finally:
        gc.enable()


def parse(
    family: str,
    pieces: Collection[Piece] | Iterator[Piece],
    *,
    tools: dict[str, Any] | None = NO_TOOLS,
    tokens: Collection[str] = (),
    reasons: bool = False,
    is_cut: bool = False,
    whole_calls: bool = False,
) -> Parsed:
    parser = OutputParser(FAMILIES[family], tools, tokens, reasons=reasons, whole_calls=whole_calls)
    events: list[Event] = []
    for text, offsets in pieces:
        steady = parser.steady
        if text and steady is not None and not offsets and steady.pattern.fullmatch(text):
            events.append(steady.event(text))  # as readers of answers do
        else:
            events += parser.feed(text, offsets)
    return collected([*events, *parser.finish(is_cut)])


def parse_text(family: str, text: str, **settings: Any) -> Parsed:
    """Parses a text whose markers are no tokens, in one piece."""
    return parse(family, [(text, [])], **settings)


def collected(events: Sequence[Event]) -> Parsed:
    content, reasoning, whole = "", "", 0
    calls: list[tuple[str, list[str]]] = []
    for event in events:
        match event:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallBegin(name):
                calls.append((name, []))
            case Arguments(text):
                calls[-1][1].append(text)
            case CallEnd():
                whole += 1
    return Parsed(content, reasoning, [(name, "".join(arguments)) for name, arguments in calls], whole)


def _short(text: str, draw: random.Random) -> Iterator[Piece]:
    at = 0
    while at < len(text):
        size = draw.randint(1, 6)
        yield text[at : at + size], []
        at += size
