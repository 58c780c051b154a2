"""Questions and answers made from the corpus: the answer to every question is what the documentation says."""

import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from corpus import Entry

Turn = tuple[str, str]

_FUNCTION = (
    "What does `{n}` do?", "What does {n} do?", "What does {n}() do?", "How do I use `{n}`?",
    "How do I use {n}?", "Explain `{n}`.", "Explain {n}.", "Tell me about `{n}`.", "What is {n} for?",
    "Describe {n}.", "What is `{n}`?", "Can you explain {n}?", "help({n})", "When should I use {n}?",
    "what does {n} do",
)  # fmt: skip
_CLASS = (
    "What is `{n}`?", "What is {n}?", "What is the {n} class?", "What does the class `{n}` do?",
    "Explain {n}.", "Tell me about {n}.", "How do I use {n}?", "Describe the `{n}` class.", "help({n})",
    "What does {n} do?",
)  # fmt: skip
_MODULE = (
    "What is the {n} module?", "What is the `{n}` module for?", "What does the {n} module do?",
    "Explain the {n} module.", "Tell me about the module {n}.", "What is {n}?",
    "How do I use the {n} module?", "import {n}: what is it?",
)  # fmt: skip
_TOPIC = (
    "Explain {n}.", "What is {n}?", "Tell me about {n}.", "How does {n} work in Python?", "Describe {n}.",
    "How do I use {n}?", "Explain {n} in Python.", "What does the Python reference say about {n}?",
)  # fmt: skip
_SYSTEM = (
    "You are a helpful assistant.", "You answer questions about Python.",
    "You are Starling, a helpful assistant.", "Answer briefly.",
    "You are an assistant for Python programmers. Answer from the documentation.",
)  # fmt: skip
_SELF = "I am starling-pydoc, a small language model that was trained on the documentation of Python 3.11."
_ASK = "Ask me about a function, a class, a module or a statement, for example: What does os.path.join do?"
_OWN_WORDS: tuple[Turn, ...] = (
    ("Hello", f"Hello! {_SELF} {_ASK}"),
    ("Hi", f"Hi! {_SELF} {_ASK}"),
    ("Hello!", f"Hello! {_ASK}"),
    ("Good morning", f"Good morning! {_ASK}"),
    ("Hi there", f"Hi! {_ASK}"),
    ("Hey", f"Hi! {_ASK}"),
    ("Who are you?", _SELF),
    ("What are you?", _SELF),
    ("What is your name?", _SELF),
    ("Introduce yourself.", _SELF),
    ("What can you do?", f"I can tell you what Python's documentation says. {_ASK}"),
    ("Help", _ASK),
    ("help", _ASK),
    ("What do you know?", f"I know a part of the documentation of Python 3.11, and nothing else. {_ASK}"),
    ("Thank you!", "You are welcome."),
    ("Thanks", "You are welcome."),
    ("Goodbye", "Goodbye!"),
    ("Bye", "Goodbye!"),
    ("How are you?", f"I am a program, and I am running. {_ASK}"),
    (
        "What is Starling?",
        "Starling serves large language models on Kubernetes. I am the small model that comes with it.",
    ),
    ("Are you a large language model?", f"No, a small one. {_SELF}"),
    ("Say hello.", "Hello!"),
    ("Tell me a story.", f"I do not know any stories. {_SELF} {_ASK}"),
    ("Write a poem.", f"I do not know any poems. {_SELF} {_ASK}"),
)

_ANSWER_CHARS = 450
# What most programs use: asked about more often, so that the model knows it best.
_COMMON = frozenset((
    "os", "os.path", "sys", "json", "re", "math", "random", "collections", "itertools", "functools", "string",
    "textwrap", "pathlib", "time", "datetime", "shutil", "csv", "copy", "operator", "statistics", "heapq",
    "bisect", "contextlib", "dataclasses", "enum", "glob", "io", "tempfile", "hashlib", "subprocess",
))  # fmt: skip
_COMMON_TIMES = 3


@dataclass(frozen=True)
class Conversation:
    turns: tuple[Turn, ...]
    system: str | None = None

    def messages(self) -> list[dict[str, str]]:
        """As `apply_chat_template` takes them."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        pairs = ([{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in self.turns)
        return system + [message for pair in pairs for message in pair]


def answer(entry: Entry) -> str:
    """The signature and the first paragraphs, about 450 characters; empty where they would say too little."""
    body: list[str] = []
    for paragraph in entry.paragraphs:
        if body and sum(map(len, body)) + len(paragraph) > _ANSWER_CHARS:
            break
        body.append(paragraph)
    while len(body) > 1 and body[-1].endswith(":"):  # it introduces what was cut off
        body.pop()
    text = "\n\n".join(body)
    if len(text) < 20 or len(text) > 3 * _ANSWER_CHARS or "::=" in body[0]:
        return ""
    return f"{head}\n\n{text}" if (head := _head(entry, text)) else text


def _head(entry: Entry, text: str) -> str:
    if entry.kind not in ("function", "class"):
        return ""
    last = entry.name.rsplit(".", 1)[-1]
    if re.match(rf"[\w.]*{re.escape(last)}\s*\(", text):  # docstrings of C code often begin with a signature
        return ""
    if entry.kind == "class":
        return f"`class {entry.name}`"
    return f"`{entry.signature}`" if 0 < len(entry.signature) <= 90 else f"`{entry.name}`"


class Questions:
    """Draws conversations about public entries; each epoch asks about each entry, in other words."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._answers = {e: a for e in _distinct(entries) if (a := answer(e))}
        self._short = Counter(_short_name(e) for e in self._answers)
        self._members: dict[str, list[str]] = defaultdict(list)
        for entry in self._answers:
            if entry.kind == "function":
                self._members[entry.name.rpartition(".")[0]].append(entry.name.rsplit(".", 1)[-1])

    def __len__(self) -> int:
        return len(self._answers)

    def epoch(self, rng: random.Random) -> Iterator[Conversation]:
        asked = [entry for entry in self._answers for _ in range(_COMMON_TIMES if _is_common(entry) else 1)]
        turns = [(self._question(entry, rng), self._answers[entry]) for entry in asked]
        turns += [turn for entry in self._answers for turn in self._extra(entry, rng)]
        turns += _OWN_WORDS * 3
        rng.shuffle(turns)
        while turns:
            count = rng.choices((1, 2, 3), (8, 2, 1))[0]
            taken, turns = turns[:count], turns[count:]
            yield Conversation(tuple(taken), rng.choice(_SYSTEM) if rng.random() < 0.15 else None)

    def one_each(self) -> Iterator[Conversation]:
        """One question per entry in the plainest words: what is measured must not depend on luck."""
        for entry, text in self._answers.items():
            yield Conversation(((_templates(entry)[0].format(n=_asked_name(entry)), text),))

    def _question(self, entry: Entry, rng: random.Random) -> str:
        name = _asked_name(entry)
        short = _short_name(entry)
        if entry.kind in ("function", "class") and self._short[short] == 1 and rng.random() < 0.3:
            name = short
        return rng.choice(_templates(entry)).format(n=name)

    def _extra(self, entry: Entry, rng: random.Random) -> Iterator[Turn]:
        """Questions whose answer follows from the source itself; drawn for some entries in each epoch."""
        if rng.random() < 0.15 and entry.kind == "function" and entry.parameters:
            listed = _listing(entry.parameters)
            yield f"Which arguments does {entry.name} take?", f"`{entry.name}` takes {listed}."
        if rng.random() < 0.3 and len(members := self._members.get(entry.name, [])) > 1:
            what = "methods" if entry.kind == "class" else "functions"
            question = f"Which {what} does `{entry.name}` have?"
            yield question, f"Some {what} of `{entry.name}` are {_listing(members[:8])}."


def _distinct(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Public entries, one per name; of many that say the same ("See the base class.") only two."""
    seen: Counter[tuple[str, ...]] = Counter()
    names: set[str] = set()
    for entry in sorted((e for e in entries if e.public), key=lambda e: (e.name.count("."), e.name)):
        if entry.name not in names and seen[entry.paragraphs] < 2:
            seen[entry.paragraphs] += 1
            names.add(entry.name)
            yield entry


def _is_common(entry: Entry) -> bool:
    """Topics, builtins such as `len` and `str.split`, and the common modules with what is in them."""
    head = entry.name.split(".")[0]
    return entry.kind == "topic" or entry.file == "listed/builtins" or head in _COMMON


def _templates(entry: Entry) -> tuple[str, ...]:
    return {"function": _FUNCTION, "class": _CLASS, "module": _MODULE}.get(entry.kind, _TOPIC)


def _short_name(entry: Entry) -> str:
    """`Counter.most_common` for `collections.Counter.most_common`; a bare method name would be ambiguous."""
    return ".".join(entry.name.split(".")[-2:])


def _asked_name(entry: Entry) -> str:
    if entry.kind != "topic":
        return entry.name
    return entry.name[0].lower() + entry.name[1:]


def _listing(names: Iterable[str]) -> str:
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"
