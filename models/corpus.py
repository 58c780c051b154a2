"""The text that the model learns: what a Python installation says about itself, and which of it is held out.

Three sources, all under the PSF licence and all part of Python: the language reference as `pydoc` shows it, the
docstrings of the standard library's source (parsed, not imported), and the docstrings of what is written in C.
"""

import ast
import hashlib
import importlib
import io
import sys
import sysconfig
import types
import warnings
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from clean import paragraphs

Kind = Literal["function", "class", "module", "topic", "text"]

# Names under which users know what a private file defines.
_PUBLIC = {"posixpath": "os.path", "_pydecimal": "decimal", "_pyio": "io", "_collections_abc": "collections.abc"}
_SKIPPED_FILES = ("site-packages/", "ntpath.py", "lib2to3/tests/", "ensurepip/_bundled")
# Importing these opens windows or browsers, prints, or warns without adding a docstring that matters.
_NOT_IMPORTED = {"antigravity", "this", "idlelib", "lib2to3", "tkinter", "turtle", "turtledemo", "test", "nt", "distutils"}
_PLAIN_FILES = ("LICENSE.txt", "email/architecture.rst", "idlelib/README.txt", "idlelib/extend.txt", "idlelib/NEWS.txt")
# A paragraph shorter than this ("Changed in version 3.8.") tells nothing about the document that it is in.
_TELLING_CHARS = 40


@dataclass(frozen=True)
class Entry:
    """One documented thing: `name` as users write it, and its paragraphs; `file` groups what was written together."""

    name: str
    kind: Kind
    file: str
    paragraphs: tuple[str, ...]
    signature: str = ""
    parameters: tuple[str, ...] = ()

    @property
    def public(self) -> bool:
        return self.kind != "text" and not any(part.startswith("_") for part in self.name.split("."))


@dataclass(frozen=True)
class Corpus:
    """Training entries, and held-out entries of which no telling paragraph is in the training entries."""

    train: tuple[Entry, ...]
    held_out: tuple[Entry, ...]


def load() -> Corpus:
    """The whole corpus of the running Python; the same for every call on one build of Python."""
    return split([*topic_entries(), *source_entries(), *builtin_entries(), *plain_entries()])


def is_held_out(entry: Entry) -> bool:
    """A choice by name alone, so that it is the same in every process and survives new entries."""
    percent = 6 if entry.kind == "topic" else 3
    digest = hashlib.sha256(f"held-out:{entry.name}".encode()).digest()
    return entry.kind != "text" and int.from_bytes(digest[:4], "big") % 100 < percent


def split(entries: Iterable[Entry]) -> Corpus:
    train, held_out = [], []
    for entry in entries:
        (held_out if is_held_out(entry) else train).append(entry)
    hidden = {p.strip() for entry in held_out for p in entry.paragraphs if len(p) >= _TELLING_CHARS}
    shown = [_without(entry, hidden) for entry in train]
    return Corpus(tuple(entry for entry in shown if entry.paragraphs), tuple(held_out))


def _without(entry: Entry, hidden: set[str]) -> Entry:
    kept = tuple(p for p in entry.paragraphs if p.strip() not in hidden)
    # What is left of an entry that lost a paragraph is still English, but no longer an answer about its name.
    kind: Kind = entry.kind if len(kept) == len(entry.paragraphs) else "text"
    return Entry(entry.name, kind, entry.file, kept, entry.signature, entry.parameters)


def topic_entries() -> Iterator[Entry]:
    """The language reference: one entry per page, named by its title, e.g. 'The `with` statement'."""
    from pydoc_data.topics import topics

    for key in sorted(topics):
        title, *rest = paragraphs(topics[key], code_in_quotes=True)
        yield Entry(title, "topic", f"topics/{key}", tuple(rest))


def source_entries() -> Iterator[Entry]:
    """Every docstring in the source of the standard library, without importing any of it."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        if relative.startswith(_SKIPPED_FILES):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # the test suite ships files that are broken on purpose
            continue
        module = relative.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        yield from _tree_entries(tree, _PUBLIC.get(module, module), relative)


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
    parameters = tuple(a.split("=")[0].strip("* ") for a in written if a.strip("* /") and a.split("=")[0].strip("* ").isidentifier())
    return Entry(name, "function", file, kept, f"{name}({', '.join(written)})", parameters)


def builtin_entries() -> Iterator[Entry]:
    """Docstrings of what is written in C, e.g. `len`, `str.split`, `itertools.chain`, and of public re-exports."""
    names = sorted(n for n in sys.stdlib_module_names if not n.startswith("_") and n not in _NOT_IMPORTED)
    for module_name in names:
        try:
            with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                module = importlib.import_module(module_name)
        except ImportError:  # made for another platform, or left out of this build
            continue
        yield from _member_entries(module, module_name)


def _member_entries(module: types.ModuleType, module_name: str) -> Iterator[Entry]:
    owners = {module_name, f"_{module_name}", None, "posix" if module_name == "os" else module_name}
    for key in sorted(getattr(module, "__all__", vars(module))):
        value = getattr(module, key, None)
        listed = hasattr(module, "__all__") or getattr(value, "__module__", None) in owners
        if key.startswith("_") or not callable(value) or not listed:
            continue
        name = key if module_name == "builtins" else f"{module_name}.{key}"
        yield from _object_entries(value, name, module_name)


def _object_entries(value: object, name: str, file: str) -> Iterator[Entry]:
    doc = getattr(value, "__doc__", None)
    if isinstance(doc, str) and (kept := tuple(paragraphs(doc))):
        signature = "" if isinstance(value, type) else _signature(value, name)
        yield Entry(name, "class" if isinstance(value, type) else "function", f"builtin/{file}", kept, signature)
    if isinstance(value, type):
        for key in sorted(vars(value)):
            if not key.startswith("_") and callable(member := vars(value)[key]):
                yield from _object_entries(member, f"{name}.{key}", file)


def _signature(value: object, name: str) -> str:
    """From the text signature of C code, `($self, iterable, /)`, without what users never write."""
    text = getattr(value, "__text_signature__", None)
    if not isinstance(text, str) or " at 0x" in text or isinstance(value, types.FunctionType):
        return ""
    written = [part.strip() for part in text.strip("()").split(",")]
    return f"{name}({', '.join(p for p in written if p and p != '/' and not p.startswith('$'))})"


def plain_entries() -> Iterator[Entry]:
    """Longer English that ships beside the library: the licence, and what its authors wrote about some parts of it."""
    root = Path(sysconfig.get_path("stdlib"))
    for name in _PLAIN_FILES:
        if (root / name).exists():
            text = (root / name).read_text(encoding="utf-8", errors="replace")
            yield Entry(name, "text", name, tuple(paragraphs(text)))
