"""`spec.model.source`: weights come from a hub, a PersistentVolumeClaim or a folder of the node."""

import posixpath
import re
from dataclasses import dataclass
from typing import Literal

from starling_agent.contract.config import is_pinned

MODELS_PATH = "/models"
"""Mount point of a claim with weights, read-only."""
_HUB = re.compile(r"[\w.-]+/[\w.-]+(:[\w./-]+\.gguf)?(@[\w./-]+)?")
_CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
FIELD = "model.source"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """`url` is given to the agent; `claim` is the PersistentVolumeClaim to mount at /models."""

    scheme: Literal["hf", "pvc", "file"]
    url: str
    claim: str | None = None

    @property
    def is_mutable(self) -> bool:
        """True if it may mean other weights tomorrow: a name of the hub without a commit."""
        return self.scheme == "hf" and not is_pinned(self.url)


def parse_source(text: str) -> ModelSource:
    """Parses hf://org/name[:file.gguf][@revision], pvc://claim/path or file:///path. Raises ValueError naming the field."""
    scheme, separator, rest = text.partition("://")
    if separator and scheme == "hf":
        return _hub(text, rest)
    if separator and scheme == "pvc":
        return _claim(text, rest)
    if separator and scheme == "file" and rest.startswith("/"):
        return ModelSource("file", text)
    raise ValueError(f"{FIELD}: must be hf://org/name[:file.gguf][@revision], pvc://claim/path or file:///path, got {text!r}")


def _hub(text: str, name: str) -> ModelSource:
    if not _HUB.fullmatch(name):
        raise ValueError(f"{FIELD}: after hf:// comes org/name[:file.gguf][@revision], got {text!r}")
    return ModelSource("hf", text)


def _claim(text: str, rest: str) -> ModelSource:
    claim, _, path = rest.partition("/")
    if not _CLAIM.fullmatch(claim):
        raise ValueError(f"{FIELD}: after pvc:// comes the name of a PersistentVolumeClaim and a path in it, got {text!r}")
    if ".." in path.split("/"):
        raise ValueError(f"{FIELD}: the path must not leave the claim with .., got {text!r}")
    return ModelSource("pvc", f"file://{posixpath.normpath(posixpath.join(MODELS_PATH, path.strip('/')))}", claim)
