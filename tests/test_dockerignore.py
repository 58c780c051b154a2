"""The Dockerfiles build the wheel from what .dockerignore lets through: a package that it keeps back is missing in the images."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_images_are_built_from_every_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {package.partition("/")[0] for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert len(folders) > 5 and folders <= let_through
