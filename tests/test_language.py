"""The code speaks one language: `docs/glossary.md` says which word means what, and these tests hold the rest."""

import ast
import functools
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PACKAGES = (
    "crds/starling_crds",
    "engine/starling_engine",
    "agent/starling_agent",
    "operator/starling_operator",
    "router/starling_router",
    "cli/starling_cli",
)
BARE_OPENINGS = frozenset(
    (  # noqa: SIM905 - words are easier to read and to add to
        "what which who whom whose whoever whatever when where while how why whether that "  # relatives
        "it its they their them those these this he she we our ours us one ones some others another none nobody somebody both each "
        "of by in on at as to for from with without within into onto between among after before behind beside besides below above "
        "under over until till since through throughout during against per up out about like unlike "  # prepositions
        "and or but if unless because so than then else"
    ).split()
)
"""Words that cannot begin a docstring: they stand for a subject that the reader has to guess, or go before one."""
OPENINGS_WITH_A_NOUN = frozenset(("each", "both", "one", "some", "another", "this", "that", "these", "those", "its", "our"))
"""Words that may begin it when a noun follows: "Each rank", "This node's address"."""
FOLLOWS_NO_NOUN = frozenset(
    (  # noqa: SIM905
        "of that is are was were has have had may might can could will would which who whose what in on at by to for from with and "
        "or not be been do does did must should shall"
    ).split()
)
LONGEST_SENTENCE = 25
"""Words, in a docstring's prose."""
BANNED = frozenset(
    (  # noqa: SIM905
        "told tells tell heard wishes wish bells bell keeps keepers fetches asks claims saves seldom nice holder holders together "
        "lockstep beats occupant far outside desk bed door strays absences"
    ).split()
)
"""Words of no identifier: the glossary says what is said instead."""
SAME_NAMES: dict[str, str] = {}
"""Public classes that share a name, with the reason."""


@dataclass
class Findings:
    """Places in the sources that break a rule, by the rule; of public classes all places by their name."""

    openings: list[str] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    classes: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


@functools.cache
def findings() -> Findings:
    """Reads every source once, whichever of the rules is asked for."""
    found = Findings()
    for package in PACKAGES:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            _look(str(path.relative_to(REPOSITORY)), ast.parse(path.read_text()), found)
    return found


def _look(path: str, tree: ast.Module, found: Findings) -> None:
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef) and not statement.name.startswith("_"):
            found.classes[statement.name].append(path)
    for node in ast.walk(tree):
        for line, text in _docstrings(node):
            if _opens_badly(text):
                found.openings.append(f"{path}:{line}: {text.split()[:6]}")
            found.sentences += [f"{path}:{line}: {' '.join(sentence.split())}" for sentence in _long_sentences(text)]
        if (name := _name(node)) is not None and _is_banned(name):
            found.names.append(f"{path}:{getattr(node, 'lineno', 0)}: {name}")


def _docstrings(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Docstrings of modules, classes and functions, and strings that stand below what they describe."""
    body = getattr(node, "body", None)
    for statement in body if isinstance(body, list) else ():
        value = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield statement.lineno, value.value


def _name(node: ast.AST) -> str | None:
    """The identifier that a node brings or uses; what is imported is named by others."""
    for each in () if isinstance(node, ast.alias) else ("name", "attr", "arg", "id"):
        if (value := getattr(node, each, None)) is not None:
            return value if isinstance(value, str) else None
    return None


@functools.cache
def _is_banned(name: str) -> bool:
    return not BANNED.isdisjoint(part.lower() for part in re.findall(r"[A-Z]?[a-z]+", name))


def _opens_badly(text: str) -> bool:
    words = re.findall(r"[A-Za-z']+|\S", text)
    if not words or words[0].lower() not in BARE_OPENINGS:
        return False
    follows = words[1].lower() if len(words) > 1 else ""
    return not (words[0].lower() in OPENINGS_WITH_A_NOUN and follows.replace("'", "").isalpha() and follows not in FOLLOWS_NO_NOUN)


def _prose(text: str) -> str:
    """The text without drawings, and without lists of fields (a name, two spaces or more, its meaning)."""
    lines = inspect.cleandoc(text).splitlines()
    return "\n".join("" if line.startswith("  ") or re.match(r"\S+(, \S+)*  +\S", line) else line for line in lines)


def _long_sentences(text: str) -> list[str]:
    sentences = re.split(r"(?<=[.:;!?])\s+|\n\s*\n|\n(?=- )", _prose(text))
    return [sentence for sentence in sentences if len(sentence.split()) > LONGEST_SENTENCE]


def test_no_two_public_classes_share_a_name() -> None:
    classes = findings().classes
    assert {name: paths for name, paths in classes.items() if len(paths) > 1 and name not in SAME_NAMES} == {}


def test_no_identifier_has_a_banned_word() -> None:
    assert findings().names == []


def test_docstrings_begin_with_their_subject_or_verb() -> None:
    assert findings().openings == []


def test_sentences_of_docstrings_are_short() -> None:
    assert findings().sentences == []


if __name__ == "__main__":
    wanted = tuple(sys.argv[1:])
    for finding in findings().openings + findings().sentences + sorted(set(findings().names)):
        if finding.startswith(wanted):
            print(finding)
