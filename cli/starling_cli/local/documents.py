"""Manifest files: several documents in one, each with its name and location, before anything is validated."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KIND = "InferenceService"
API_VERSION = "serving.starling.dev/v1alpha1"
STANDARD_INPUT = "-"


class DocumentError(Exception):
    """A file that cannot be read, or that is no list of Kubernetes objects."""


@dataclass(frozen=True)
class Document:
    """One object of a file. `number` counts documents from 1."""

    file: str
    number: int
    body: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.body.get("kind", ""))

    @property
    def name(self) -> str:
        return self._metadata("name")

    @property
    def namespace(self) -> str:
        return self._metadata("namespace")

    def _metadata(self, field: str) -> str:
        metadata = self.body.get("metadata")
        return str(metadata.get(field) or "") if isinstance(metadata, dict) else ""

    @property
    def is_service(self) -> bool:
        return self.kind == KIND

    @property
    def location(self) -> str:
        return f"{self.file} (document {self.number}, {self.kind or 'no kind'} {self.name or 'without a name'})"


def read_documents(file: Path) -> list[Document]:
    """Raises DocumentError. The file `-` is standard input."""
    try:
        text = sys.stdin.read() if str(file) == STANDARD_INPUT else file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DocumentError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return list(parse_documents(text, "standard input" if str(file) == STANDARD_INPUT else str(file)))


def parse_documents(text: str, file: str) -> Iterator[Document]:
    """Empty documents are left out; a List stands for its items. Raises DocumentError."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        bodies = list(yaml.load_all(text, loader))
    except yaml.YAMLError as error:
        raise DocumentError(f"{file} is not YAML: {error}") from None
    for number, body in enumerate(bodies, 1):
        if body is None:
            continue
        if not isinstance(body, dict):
            raise DocumentError(f"{file} (document {number}) is no Kubernetes object, which is a mapping with apiVersion and kind")
        items = body.get("items") if body.get("kind") == "List" else [body]
        for item in items or ():
            yield Document(file, number, item)


def one_service(documents: Sequence[Document], file: str, name: str | None) -> Document:
    """The InferenceService to run. Raises DocumentError saying which there are."""
    services = [document for document in documents if document.is_service]
    chosen = [document for document in services if name in (None, document.name)]
    names = ", ".join(document.name for document in services) or "none"
    if len(chosen) == 1:
        return chosen[0]
    if not services:
        kinds = ", ".join(dict.fromkeys(document.kind or "no kind" for document in documents)) or "nothing"
        raise DocumentError(f"{file} has no document of kind {KIND}; it has: {kinds}")
    if name is not None:
        raise DocumentError(f"{file} has no InferenceService {name!r}; it has: {names}")
    raise DocumentError(f"{file} has {len(services)} InferenceServices ({names}) and one runs at a time; pick one with --name")


def objects_of_kind(documents: Sequence[Document], kind: str) -> dict[str, dict[str, Any]]:
    """Returns the objects of a kind by name."""
    return {document.name: document.body for document in documents if document.kind == kind}
