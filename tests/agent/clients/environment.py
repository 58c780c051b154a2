"""The clients of others that `make clients` brings, each kind in an environment of its own."""

import hashlib
import os
from pathlib import Path

import pytest

OFFLINE = {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""Variables with which a client reaches no host but this one: some look for updates, price lists or plugins.

LiteLLM, which Aider has too, would try three times to get its prices.
"""
PINS = Path(__file__).parent / "pins"
_CACHE = Path(os.environ.get("STARLING_CACHE") or Path.home() / ".cache/starling").absolute()
_DIGEST = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(PINS.iterdir()))).hexdigest()


def program(part: str, name: str) -> str:
    """Returns the path of a program; `part` is `python`, `aider` or `agents`. Skips the test where it is not there.

    A fixture of the session asks for it, so that a test that is skipped starts no server before.
    """
    folder = "node_modules/.bin" if part == "agents" else "bin"
    path = _CACHE / f"clients-{_DIGEST[:12]}" / part / folder / name
    if not path.exists():
        pytest.skip("`make clients` brings the clients of others")
    return str(path)
