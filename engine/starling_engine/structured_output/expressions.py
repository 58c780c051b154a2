"""Expressions of callers, in the syntax of Rust's regex crate, matched by the whole output.

The library refuses what it lacks (backreferences, looking ahead or behind, anchors in the middle). Refused here is what it reads
otherwise than dialects in which `a*+` never gives back what it has matched.
"""

import re

from starling_engine.errors import InvalidRequest

MAX_CHARACTERS = 10_000
_QUANTIFIER = re.compile(r"[*+?]|\{\d*,?\d*\}", re.ASCII)


def check_expression(regex: str, param: str, path: str = "") -> None:
    """Raises `InvalidRequest` for what would be read in two ways. `path` is where the expression stands in the request's field."""
    if len(regex) > MAX_CHARACTERS:
        raise InvalidRequest(f"{path}the expression has {len(regex)} characters; {MAX_CHARACTERS} are possible", param)
    if _repeats_repetition(regex):
        raise InvalidRequest(f"{path}the expression repeats a repetition; put brackets around what is repeated", param)


def _repeats_repetition(regex: str) -> bool:
    at, classes = 0, 0
    while at < len(regex):
        if regex[at] == "\\":
            at += 2
        elif regex[at] == "[":
            classes += 1
            # A bracket that comes first in a class is one of its characters.
            at += next(len(first) for first in ("[^]", "[]", "[") if regex.startswith(first, at))
        elif classes or not (repeated := _QUANTIFIER.match(regex, at)):
            classes -= bool(classes) and regex[at] == "]"
            at += 1
        else:
            at = repeated.end() + (regex[repeated.end() : repeated.end() + 1] == "?")
            if _QUANTIFIER.match(regex, at):
                return True
    return False
