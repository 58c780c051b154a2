"""The text that the model learns: what a Python installation says about itself, and which of it is held out.

All of it is part of Python and under the PSF licence: the language reference as `pydoc` shows it, docstrings
and longer comments in the source of the standard library (parsed, not imported), and the docstrings of what
is written in C.
"""

import ast
import hashlib
import importlib
import io
import re
import sys
import sysconfig
import types
import warnings
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from clean import paragraphs

Kind = Literal["function", "class", "module", "topic", "text"]

# Names under which users know what a private file defines.
_PUBLIC = {
    "posixpath": "os.path",
    "_pydecimal": "decimal",
    "_pyio": "io",
    "_collections_abc": "collections.abc",
}
# Test suites and tools say the same few things a thousand times; codec tables say nothing.
_SKIPPED = frozenset((
    "site-packages", "test", "tests", "idlelib", "lib2to3", "distutils", "ensurepip", "turtledemo",
    "encodings", "ntpath.py",
))  # fmt: skip
# Importing these opens windows or browsers, prints, or repeats what other modules say.
_NOT_IMPORTED = frozenset((
    "antigravity", "this", "idlelib", "lib2to3", "tkinter", "turtle", "turtledemo", "distutils", "nt",
    "posix", "posixpath", "ntpath", "genericpath", "sre_compile",
))  # fmt: skip
_PUBLIC_SUBMODULES = (
    "collections.abc", "concurrent.futures", "email.message", "email.policy", "email.utils", "html.parser",
    "http.client", "http.cookies", "http.server", "importlib.abc", "importlib.metadata",
    "importlib.resources", "importlib.util", "logging.config", "logging.handlers", "multiprocessing.pool",
    "os.path", "unittest.mock", "urllib.error", "urllib.parse", "urllib.request", "urllib.robotparser",
    "wsgiref.simple_server", "xml.dom.minidom", "xml.etree.ElementTree", "xml.sax",
)  # fmt: skip
_PLAIN_FILES = ("LICENSE.txt", "email/architecture.rst", "idlelib/README.txt", "idlelib/extend.txt")
# A paragraph shorter than this ("Changed in version 3.8.") tells nothing about the document that it is in.
_TELLING_CHARS = 40


@dataclass(frozen=True)
class Entry:
    """One documented thing: `name` as users write it; `file` groups what was written together.

    `public` is for what users import: a question about it makes sense.
    """

    name: str
    kind: Kind
    file: str
    paragraphs: tuple[str, ...]
    signature: str = ""
    parameters: tuple[str, ...] = ()
    public: bool = False


@dataclass(frozen=True)
class Corpus:
    """Training entries, and held-out entries of which no telling paragraph is in the training entries."""

    train: tuple[Entry, ...]
    held_out: tuple[Entry, ...]


def load() -> Corpus:
    """The whole corpus of the running Python; the same for every call on one build of Python."""
    listed = list(listed_entries())
    public = {entry.name for entry in listed}
    source = [replace(entry, public=entry.name in public) for entry in source_entries()]
    known = {entry.name for entry in source}
    only_listed = (entry for entry in listed if entry.name not in known)
    return split([*topic_entries(), *source, *only_listed, *plain_entries()])


def is_held_out(entry: Entry) -> bool:
    """A choice by name alone, so that it is the same in every process and survives new entries."""
    percent = 6 if entry.kind == "topic" else 3
    digest = hashlib.sha256(f"pydoc/{entry.name}".encode()).digest()
    return entry.kind != "text" and int.from_bytes(digest[:4], "big") % 100 < percent


def split(entries: Iterable[Entry]) -> Corpus:
    train: list[Entry] = []
    held_out: list[Entry] = []
    for entry in entries:
        (held_out if is_held_out(entry) else train).append(entry)
    hidden = {p.strip() for entry in held_out for p in entry.paragraphs if len(p) >= _TELLING_CHARS}
    shown = [_without(entry, hidden) for entry in train]
    return Corpus(tuple(entry for entry in shown if entry.paragraphs), tuple(held_out))


def _without(entry: Entry, hidden: set[str]) -> Entry:
    kept = tuple(p for p in entry.paragraphs if p.strip() not in hidden)
    # What is left of an entry that lost a paragraph is still English, but no longer an answer about its name.
    kind: Kind = entry.kind if len(kept) == len(entry.paragraphs) else "text"
    return replace(entry, kind=kind, paragraphs=kept, public=entry.public and kind == entry.kind)


def topic_entries() -> Iterator[Entry]:
    """The language reference: one entry per page, named by its title, e.g. 'The `with` statement'."""
    from pydoc_data.topics import topics

    for key in sorted(topics):
        title, *rest = paragraphs(topics[key], code_in_quotes=True)
        yield Entry(title, "topic", f"topics/{key}", tuple(rest), public=True)


def source_entries() -> Iterator[Entry]:
    """Every docstring and every longer comment in the standard library, without importing any of it."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        file = path.relative_to(root)
        if any(part in _SKIPPED for part in file.parts):
            continue
        source = path.read_text(encoding="utf-8", errors="replace")
        module = file.as_posix().removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        yield from _tree_entries(ast.parse(source), _PUBLIC.get(module, module), file.as_posix())
        for number, comment in enumerate(_comments(source)):
            place = f"#{number}"
            yield Entry(module + place, "text", file.as_posix() + place, tuple(paragraphs(comment)))


def _comments(source: str) -> Iterator[str]:
    """Blocks of at least two lines that are mostly words: not code that was commented out, not tables."""
    for match in re.finditer(r"(?:^[ \t]*#(?: .*)?\n){2,}", source, re.MULTILINE):
        text = re.sub(r"^[ \t]*# ?", "", match.group(), flags=re.MULTILINE)
        words = sum(c.isalpha() or c == " " for c in text)
        if len(text) > 120 and words / len(text) > 0.88 and "coding:" not in text:
            yield text


def _tree_entries(node: ast.AST, name: str, file: str) -> Iterator[Entry]:
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        doc = ast.get_docstring(node)
        if doc and (kept := tuple(paragraphs(doc))):
            yield _entry_of(node, name, file, kept)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _tree_entries(child, f"{name}.{child.name}", file)
        elif isinstance(child, (ast.If, ast.Try)):
            yield from _tree_entries(child, name, file)


def _entry_of(node: ast.AST, name: str, file: str, kept: tuple[str, ...]) -> Entry:
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return Entry(name, "class" if isinstance(node, ast.ClassDef) else "module", file, kept)
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    written = [a.strip() for a in ast.unparse(node.args).split(",")]
    written = written[1:] if written[0] in ("self", "cls") else written
    names = (a.split("=")[0].strip("* ") for a in written)
    parameters = tuple(name for name in names if name.isidentifier())
    return Entry(name, "function", file, kept, f"{name}({', '.join(written)})", parameters)


def listed_entries() -> Iterator[Entry]:
    """What public modules list: the only source for what is written in C, e.g. `len` and `str.split`."""
    names = [n for n in sys.stdlib_module_names if not n.startswith("_") and n not in _NOT_IMPORTED]
    for module_name in sorted([*names, *_PUBLIC_SUBMODULES]):
        try:
            with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                module = importlib.import_module(module_name)
        except ImportError:  # made for another platform, or left out of this build
            continue
        if module.__doc__ and module_name != "builtins":
            kept = tuple(paragraphs(module.__doc__))
            yield Entry(module_name, "module", f"listed/{module_name}", kept, public=True)
        yield from _member_entries(module, module_name)


def _member_entries(module: types.ModuleType, module_name: str) -> Iterator[Entry]:
    owners = {module_name, f"_{module_name}", None}
    for key in sorted(getattr(module, "__all__", vars(module))):
        value = getattr(module, key, None)
        listed = hasattr(module, "__all__") or getattr(value, "__module__", None) in owners
        alias = getattr(value, "__name__", key) != key
        if not key.startswith("_") and callable(value) and listed and not alias:
            name = key if module_name == "builtins" else f"{module_name}.{key}"
            yield from _object_entries(value, name, module_name)


def _object_entries(value: object, name: str, module: str) -> Iterator[Entry]:
    doc = getattr(value, "__doc__", None)
    if isinstance(doc, str) and (kept := tuple(paragraphs(doc))):
        signature = "" if isinstance(value, type) else _signature(value, name)
        kind: Kind = "class" if isinstance(value, type) else "function"
        yield Entry(name, kind, f"listed/{module}", kept, signature, public=True)
    if isinstance(value, type):
        for key in sorted(vars(value)):
            member = vars(value)[key]
            if not key.startswith("_") and callable(member) and not isinstance(member, type) and _is_own(member):
                yield from _object_entries(member, f"{name}.{key}", module)


def _is_own(member: object) -> bool:
    """Whether it is part of Python: some libraries add methods to its classes when they are imported."""
    module = getattr(member, "__module__", None)
    return module is None or str(module).split(".")[0] in sys.stdlib_module_names


def _signature(value: object, name: str) -> str:
    """From the text signature of C code, `($self, iterable, /)`, without what users never write."""
    text = getattr(value, "__text_signature__", None)
    if not isinstance(text, str) or " at 0x" in text or isinstance(value, types.FunctionType):
        return ""
    written = [part.strip() for part in text.strip("()").split(",")]
    return f"{name}({', '.join(p for p in written if p and p != '/' and not p.startswith('$'))})"


def plain_entries() -> Iterator[Entry]:
    """Longer English that ships beside the library: the licence, and notes by the authors of some parts."""
    root = Path(sysconfig.get_path("stdlib"))
    for name in _PLAIN_FILES:
        if (root / name).exists():
            text = (root / name).read_text(encoding="utf-8", errors="replace")
            yield Entry(name, "text", name, tuple(paragraphs(text)))
