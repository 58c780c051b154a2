"""A tree in plain text. Importing rich would take a good part of the time that `starling plan` has."""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Branch:
    """A line, and what hangs on it."""

    text: str
    branches: list["Branch"] = field(default_factory=list)

    def add(self, text: str) -> "Branch":
        branch = Branch(text)
        self.branches.append(branch)
        return branch

    def lines(self) -> Iterator[str]:
        yield self.text
        for branch in self.branches:
            is_last = branch is self.branches[-1]
            first, *rest = branch.lines()
            yield f"{'└── ' if is_last else '├── '}{first}"
            yield from (f"{'    ' if is_last else '│   '}{line}" for line in rest)
