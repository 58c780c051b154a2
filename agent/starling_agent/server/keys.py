"""Where API keys come from: arguments, a file, the environment."""

import os
from collections.abc import Sequence
from pathlib import Path

from starling_engine.errors import ConfigError

KEY_VARIABLE = "STARLING_API_KEY"


def api_keys(given: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """All keys, each once. The environment may hold several, separated by commas; the file one a line, # for comments.

    Raises ConfigError for an empty key or a file that gives none: an endpoint must not stay open by mistake.
    """
    keys = [*given, *_from_environment(), *(_from_file(file) if file is not None else ())]
    if any(not key.strip() for key in keys):
        raise ConfigError("a key must not be empty", "api_key")
    return tuple(dict.fromkeys(key.strip() for key in keys))


def _from_environment() -> list[str]:
    value = os.environ.get(KEY_VARIABLE, "")
    return [key for key in value.split(",") if key.strip()]


def _from_file(file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", "api_key_file") from None
    keys = [line for line in map(str.strip, lines) if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{file} holds no key", "api_key_file")
    return keys
