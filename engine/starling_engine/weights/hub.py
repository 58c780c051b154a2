"""Resolves the name of a model to a folder on disk: a local one, or a repository of the Hugging Face hub."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from starling_engine.errors import ModelError

ALLOWED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken")
"""Configs, weights and tokenizers; never pickles or code."""
IGNORED = ("*/*", "consolidated*")
"""Other formats of the same weights, which some repositories have beside them, or in folders."""

REPO_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def resolve_model(name: str, revision: str | None = None) -> Path:
    """Returns the folder of the model `name`: a path, "org/name" or "org/name@revision". A local folder wins.

    Downloads files that the cache lacks, unless HF_HUB_OFFLINE is set. Raises ModelError with the reason when it cannot.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    repo, named_revision = split_name(name)
    if named_revision and revision and named_revision != revision:
        raise ModelError(f"{name}: the name and the argument ask for two revisions, {named_revision} and {revision}")
    return _download(repo, named_revision or revision)


def split_name(name: str) -> tuple[str, str | None]:
    """Splits "org/name@revision" into repository and revision. Raises ModelError for any other form."""
    repo, at, revision = name.partition("@")
    if not REPO_ID.fullmatch(repo) or (at and not revision):
        raise ModelError(f"{name} is neither a folder here nor the id of a repository (org/name or org/name@revision)")
    return repo, revision or None


def resolve_commit(repo: str, revision: str | None) -> str:
    """Returns the commit, 40 hex digits, of the revision (None: the main branch) on the hub now. Raises ModelError."""
    from huggingface_hub import HfApi

    with _reasons(repo, revision):
        return str(HfApi().model_info(repo, revision=revision).sha)


def _download(repo: str, revision: str | None) -> Path:
    # Here, since importing it takes longer than the rest of the engine without torch.
    from huggingface_hub import snapshot_download

    with _reasons(repo, revision):
        return Path(snapshot_download(repo, revision=revision, allow_patterns=[*ALLOWED], ignore_patterns=[*IGNORED]))


@contextmanager
def _reasons(repo: str, revision: str | None) -> Iterator[None]:
    """Turns exceptions of the hub's client into ModelError with a reason."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
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
    except LocalEntryNotFoundError as error:
        raise ModelError(f"{repo} is no folder here, is not in the cache, and the hub cannot be reached: {error}") from error
    except Exception as error:
        raise ModelError(f"{repo} could not be downloaded: {type(error).__name__}: {error}") from error
