"""Turns the text of docstrings and of the language reference into paragraphs that read as plain English.

Hard line breaks carry no meaning in prose, and a model of a few million parameters should not spend any of
them on predicting where an editor wrapped a line: prose is joined to one line, all else keeps its layout.
"""

import inspect
import re

_ROLE = re.compile(r":[a-z]+(?::[a-z]+)?:`~?([^`]+)`")
_DOUBLE_BACKTICK = re.compile(r"``([^`]+)``")
_QUOTED_CODE = re.compile(r'"((?!\s)[^"\n]{1,60}?(?<!\s))"')
_EMPHASIS = re.compile(r"(?<![\w*])\*([A-Za-z_][\w ]*)\*(?![\w*])")
_BULLET = re.compile(r"(?:[-*+•|]\s|\d+[.)]\s|>>>|\.\.\s|:\w+(?: \w+)?:(?!`)|@\w+)")
_RULE = re.compile(r"[=*~^#\-]{3,}$")
_ODD_QUOTES = str.maketrans({"“": '"', "”": '"', "’": "'", "‘": "'", "\t": "    "})


def paragraphs(text: str, *, code_in_quotes: bool = False) -> list[str]:
    """The cleaned paragraphs of `text`; `code_in_quotes`: as the language reference writes "code"."""
    blocks = re.split(r"\n[ \t]*\n+", inspect.cleandoc(text.translate(_ODD_QUOTES)))
    cleaned = (_clean(block.strip("\n").rstrip(), code_in_quotes) for block in blocks)
    return [block for block in cleaned if block.strip()]


def _clean(block: str, code_in_quotes: bool) -> str:
    lines = [line.rstrip() for line in block.split("\n") if not _RULE.match(line.strip())]
    if not _is_prose(lines):
        return "\n".join(lines)
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    prose = re.sub(r"\s+", " ", " ".join(line.strip() for line in lines))
    prose = re.sub(r" ?::$", ":", prose)
    prose = _DOUBLE_BACKTICK.sub(r"`\1`", _ROLE.sub(r"`\1`", prose))
    if code_in_quotes:
        prose = _EMPHASIS.sub(r"`\1`", _QUOTED_CODE.sub(r"`\1`", prose))
    return indent + prose


def _is_prose(lines: list[str]) -> bool:
    """Whether all lines share one indent and look like sentences, not like bullets, columns or examples."""
    if not lines or _BULLET.match(lines[0].strip()):
        return False
    indents = {len(line) - len(line.lstrip()) for line in lines}
    if len(indents) > 1 or any("   " in line.strip() or "::=" in line or ">>>" in line for line in lines):
        return False
    if len(lines) == 1:
        return True
    return sum(len(line.strip()) for line in lines[:-1]) / (len(lines) - 1) > 45
