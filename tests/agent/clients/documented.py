"""The examples of docs/clients.md, with the address of a server that is there."""

import re
from pathlib import Path

_PAGE = (Path(__file__).parents[3] / "docs/clients.md").read_text()
_SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", _PAGE, re.DOTALL | re.MULTILINE))
MODEL = "Qwen/Qwen3-0.6B"


def example(section: str, language: str, url: str) -> str:
    """Returns the only example in a language of a section."""
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", _SECTIONS[section], re.DOTALL | re.MULTILINE)
    return str(text).replace("http://localhost:8000", url)


def exported(section: str, url: str) -> dict[str, str]:
    """Returns the variables that a section's example exports."""
    return dict(re.findall(r"^export (\w+)=(\S+)$", example(section, "sh", url), re.MULTILINE))
