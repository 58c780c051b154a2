"""Files that a test module writes once, and only those that are asked for."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import tokenizers

from tests.engine.checkpoints import VOCAB
from tests.engine.real_engine import MODEL

Found = TypeVar("Found")


class Written(dict[str, Found]):
    """Values by their names, each made by `write` at its first use."""

    def __init__(self, write: Callable[[str], Found]) -> None:
        self._write = write

    def __missing__(self, name: str) -> Found:
        self[name] = found = self._write(name)
        return found


def copy_tokenizer(folder: Path) -> None:
    """Copies the tokenizer of the repository's own model."""
    for each in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(MODEL) / each, folder)


def write_tokenizer(folder: Path) -> None:
    """Writes one whose tokens are those of the tests' checkpoints."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{at}": at for at in range(VOCAB)}, "w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
