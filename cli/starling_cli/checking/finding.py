"""The result of one check."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "bad", "note"]
MARKS: dict[State, str] = {"ok": "√", "bad": "×", "note": "-"}


@dataclass(frozen=True)
class Finding:
    """One line. "note" is worth knowing but no fault. `fix` says what to do about a bad one."""

    section: str
    title: str
    state: State
    detail: str = ""
    fix: str = ""


def good(section: str, title: str, detail: str = "") -> Finding:
    return Finding(section, title, "ok", detail)


def bad(section: str, title: str, detail: str, fix: str) -> Finding:
    return Finding(section, title, "bad", detail, fix)


def note(section: str, title: str, detail: str) -> Finding:
    return Finding(section, title, "note", detail)


def verdict(section: str, title: str, holds: bool, detail: str, fix: str) -> Finding:
    return good(section, title, detail) if holds else bad(section, title, detail, fix)


def lines(findings: Iterable[Finding]) -> Iterator[str]:
    """Sections with a mark before each line, and the fix under what is bad."""
    section = ""
    for finding in findings:
        if finding.section != section:
            yield from ([""] if section else [])
            section = finding.section
            yield section
        yield f"  {MARKS[finding.state]} {finding.title}{': ' if finding.detail else ''}{finding.detail}"
        if finding.fix:
            yield f"      fix: {finding.fix}"


def as_json(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    return [asdict(finding) for finding in findings]
