"""The table of results: rows, sections of Markdown, and a file in which a run replaces the sections that it ran."""

import re
from dataclasses import dataclass

NOT_RUN = "Not run yet."
TITLE = "# GPU"
PREFACE = """\
Written by `bench/gpu.sh`, section by section; [docs/gpu.md](../../docs/gpu.md) says what is measured and how. A share is of the
limit in the row. Limits are measured in the same run. A section that no GPU has run says so."""
_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `share` is how much of the limit was reached, and `goal` how much of it, at least, is wanted.

    Where the figure itself is what is wanted, `goal` is in the figure's own words and `met` says whether it is reached.
    """

    what: str
    measured: str
    limit: str = ""
    share: float | None = None
    goal: float | str | None = None
    met: bool | None = None

    def reached(self) -> bool | None:
        """None where nothing is asked for."""
        if isinstance(self.goal, float) and self.share is not None:
            return self.share >= self.goal
        return self.met


def timed(what: str, measured: str, seconds: float, goal: float | None) -> Row:
    """`measured` are the seconds, as they are to be read; less than `goal` is wanted, if any."""
    if goal is None:
        return Row(what, measured)
    return Row(what, measured, goal=f"under {goal:.0f} s", met=seconds < goal)


def section(heading: str, rows: list[Row], error: str | None = None) -> str:
    """The body of a section: where and when it ran, the figures, and what went wrong."""
    lines = [heading, ""]
    if rows:
        lines += ["| | measured | limit | share | goal |", "|---|---:|---:|---:|---:|", *map(_line, rows), ""]
    if error is not None:
        lines += ["It did not end well:", "", "```", error.strip().replace("```", "'''"), "```", ""]
    return "\n".join(lines).strip()


def _line(row: Row) -> str:
    share = "" if row.share is None else f"{row.share:.0%}"
    wanted = f"{row.goal:.0%}" if isinstance(row.goal, float) else row.goal or ""
    verdict = {True: ", met", False: ", **missed**", None: ""}[row.reached()] if wanted else ""
    return f"| {row.what} | {row.measured} | {row.limit} | {share} | {wanted}{verdict} |"


def merge(text: str, sections: dict[str, str], order: tuple[str, ...]) -> str:
    """The file `text` with these sections in place of its own; `order` names all that there are to be."""
    bodies = parse(text) | sections
    parts = [TITLE, PREFACE, *(f"## {name}\n\n{bodies.get(name, NOT_RUN)}" for name in order)]
    return "\n\n".join(parts) + "\n"


def parse(text: str) -> dict[str, str]:
    """The sections of such a file, by name."""
    pieces = _HEADING.split(text)
    return {name: body.strip() for name, body in zip(pieces[1::2], pieces[2::2], strict=True)}


def quantity(value: float, unit: str) -> str:
    """Three digits, with the prefix that suits: 4.31 TB/s, 62.0 us."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u")):
        if abs(value) >= factor:
            return f"{_digits(value / factor)} {prefix}{unit}"
    return f"{_digits(value / 1e-9)} n{unit}" if value else f"0 {unit}"


def _digits(value: float) -> str:
    return f"{value:.{max(0, 2 - (len(str(int(abs(value)))) - 1))}f}"
