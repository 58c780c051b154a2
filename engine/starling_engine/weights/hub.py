"""Resolves the name of a model to a folder, or a GGUF file or the first of several: a local one, or one of the Hugging Face hub."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from starling_engine.errors import ModelError
from starling_engine.gguf.reader import is_gguf, parts_of

ALLOWED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken", "artifact.metadata")
"""Configs, weights and tokenizers; never pickles or code."""
_OF_MODULES = ("*.json", "*.safetensors")
IGNORED = ("[!0-9]*/*", *(f"*/{pattern}" for pattern in ALLOWED if pattern not in _OF_MODULES), "consolidated*")
"""Other formats of the same weights, which some repositories have beside them, or in folders.

Folders of sentence-transformers, such as 1_Pooling and 2_Dense, begin with a digit: their configs and weights are wanted.
"""

NAME = re.compile(r"(?P<repo>[\w.-]+(/[\w.-]+)?)(:(?P<file>(?!\.\.?/)[\w.-]+(/(?!\.\.?/)[\w.-]+)*\.gguf))?(@(?P<revision>.+))?")
FORM = "org/name[:file.gguf][@revision]"
SCHEME = "hf://"
"""Begins such a name in a resource, and may do so elsewhere."""


class HubName(NamedTuple):
    """A repository of the hub, or one GGUF model of it, by its first file; `revision` None is the main branch."""

    repo: str
    revision: str | None
    file: str | None = None

    @property
    def parts(self) -> list[str]:
        """The files of a GGUF model, by their paths in the repository; empty for a whole repository."""
        return [] if self.file is None else [each.as_posix() for each in parts_of(Path(self.file))]

    def snapshot(self, model: Path) -> Path:
        """Returns the folder of the repository's files, of which `model` is this one."""
        return model if self.file is None else model.parents[len(Path(self.file).parts) - 1]


def resolve_model(name: str, revision: str | None = None) -> Path:
    """Returns the path of the model `name`: a local one, or one of the hub (see FORM). What is here wins, except over hf://.

    Downloads files that the cache lacks, unless HF_HUB_OFFLINE is set. Raises ModelError with the reason when it cannot.
    """
    path, of_hub = Path(name).expanduser(), name.startswith(SCHEME)
    if not of_hub and (path.is_dir() or (path.is_file() and is_gguf(path))):
        return path
    wanted = split_name(name.removeprefix(SCHEME))
    if wanted.revision and revision and wanted.revision != revision:
        raise ModelError(f"{name}: the name and the argument ask for two revisions, {wanted.revision} and {revision}")
    return _download(wanted._replace(revision=wanted.revision or revision))


def split_name(name: str) -> HubName:
    """Splits a name of the form FORM. Raises ModelError for any other, and for a GGUF file that goes on behind another."""
    match = NAME.fullmatch(name)
    if match is None:
        raise ModelError(f"{name} is neither a folder nor a GGUF file here, nor the name of one on the hub ({FORM})")
    if match["file"] is not None:
        parts_of(Path(match["file"]))
    return HubName(match["repo"], match["revision"], match["file"])


def resolve_commit(repo: str, revision: str | None) -> str:
    """Returns the commit, 40 hex digits, of the revision (None: the main branch) on the hub now. Raises ModelError."""
    from huggingface_hub import HfApi

    with _reasons(repo, revision):
        return str(HfApi().model_info(repo, revision=revision).sha)


def _download(name: HubName) -> Path:
    # Here, since importing it takes longer than the rest of the engine without torch.
    from huggingface_hub import hf_hub_download, snapshot_download

    with _reasons(name.repo, name.revision):
        if name.file is None:
            wanted, not_wanted = [*ALLOWED], [*IGNORED]
            return Path(snapshot_download(name.repo, revision=name.revision, allow_patterns=wanted, ignore_patterns=not_wanted))
        first, *others = name.parts
        path = Path(hf_hub_download(name.repo, first, revision=name.revision))
        for each in others:  # of the same commit: the branch may move meanwhile
            hf_hub_download(name.repo, each, revision=name.snapshot(path).name)
        return path


@contextmanager
def _reasons(repo: str, revision: str | None) -> Iterator[None]:
    """Turns exceptions of the hub's client into ModelError with a reason."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except GatedRepoError as error:
        raise ModelError(f"{repo} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"{repo} is no folder here and the hub has no such repository (a private one needs HF_TOKEN)") from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{repo} has no revision {revision}") from error
    except RemoteEntryNotFoundError as error:
        raise ModelError(f"{repo} has no such file: {error}") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(f"{repo} is no folder here, is not in the cache, and the hub cannot be reached: {error}") from error
    except Exception as error:
        raise ModelError(f"{repo} could not be downloaded: {type(error).__name__}: {error}") from error
