"""Keeps a file of results in sections, each of which is measured on its own."""

import re
from pathlib import Path


def write_section(file: Path, heading: str, title: str, text: str) -> None:
    """Writes a section of the file in place of the one that was there. A new one comes last; `heading` is the whole file's."""
    before = file.read_text() if file.exists() else ""
    sections = dict(re.findall(r"^## (.+)\n\n((?:(?!^## ).*\n)*)", before, re.MULTILINE)) | {title: text}
    file.write_text(f"# {heading}\n\n" + "\n".join(f"## {name}\n\n{each.strip()}\n" for name, each in sections.items()))
