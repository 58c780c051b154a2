"""The code speaks one language: `docs/glossary.md` says which word means what, and these tests hold the rest."""

import ast
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
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


def _sources() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            yield str(path.relative_to(REPOSITORY)), ast.parse(path.read_text())


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Docstrings of modules, classes and functions, and strings that stand below what they describe."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value


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


def bad_docstrings() -> list[str]:
    return [
        f"{path}:{line}: {text.split()[:6]}" for path, tree in _sources() for line, text in _docstrings(tree) if _opens_badly(text)
    ]


def long_sentences() -> list[str]:
    return [
        f"{path}:{line}: {' '.join(sentence.split())}"
        for path, tree in _sources()
        for line, text in _docstrings(tree)
        for sentence in _long_sentences(text)
    ]


def shared_names() -> dict[str, list[str]]:
    places = defaultdict(list)
    for path, tree in _sources():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    return {name: paths for name, paths in places.items() if len(paths) > 1 and name not in SAME_NAMES}


def banned_names() -> list[str]:
    found = []
    for path, tree in _sources():
        for node in ast.walk(tree):
            name = next((value for field in ("name", "attr", "arg", "id") if (value := getattr(node, field, None))), None)
            if not isinstance(name, str) or isinstance(node, ast.alias):
                continue
            parts = re.findall(r"[A-Z]?[a-z]+", name)
            if BANNED & {part.lower() for part in parts}:
                found.append(f"{path}:{getattr(node, 'lineno', 0)}: {name}")
    return found


def test_no_two_public_classes_share_a_name() -> None:
    assert shared_names() == {}


def test_no_identifier_has_a_banned_word() -> None:
    assert banned_names() == []


def test_docstrings_begin_with_their_subject_or_verb() -> None:
    assert bad_docstrings() == []


def test_sentences_of_docstrings_are_short() -> None:
    assert long_sentences() == []


if __name__ == "__main__":
    wanted = tuple(sys.argv[1:])
    for finding in bad_docstrings() + long_sentences() + sorted(set(banned_names())):
        if finding.startswith(wanted):
            print(finding)
