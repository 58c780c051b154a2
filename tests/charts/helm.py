"""Helm as the tests call it: the pinned release, with settings of nobody else."""

import functools
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/starling"

Values = Mapping[str, Any]
Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Helm:
    """`home` holds Helm's caches and the values of each call."""

    program: str
    home: Path

    def run(self, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
        homes = {f"HELM_{name}_HOME": str(self.home / name) for name in ("CACHE", "CONFIG", "DATA")}
        return subprocess.run([self.program, *arguments], env=os.environ | homes, capture_output=True, text=True, check=False)

    def must(self, *arguments: str | Path) -> None:
        """Fails the test with Helm's own words when Helm fails."""
        done = self.run(*arguments)
        assert done.returncode == 0, f"helm {' '.join(map(str, arguments))}: {done.stderr}"

    def lint(self, values: Values) -> "subprocess.CompletedProcess[str]":
        return self.run("lint", "--strict", CHART, "--values", self._file(values))

    def template(
        self, values: Values, *, release: str = "starling", namespace: str = "starling-system"
    ) -> "subprocess.CompletedProcess[str]":
        return self.run("template", release, CHART, "--namespace", namespace, "--values", self._file(values))

    def objects(self, values: Values, **where: str) -> list[Manifest]:
        """What the chart renders to. Fails the test with Helm's own words when it does not."""
        return parsed(_rendered(self, json.dumps(values), *sorted(where.items())))

    def _file(self, values: Values) -> Path:
        path = self.home / "values.json"
        path.write_text(json.dumps(values))
        return path


@functools.cache
def _rendered(helm: Helm, values: str, *where: tuple[str, str]) -> str:
    """Once for all tests that look at the same objects: the chart does not change between them."""
    done = helm.template(json.loads(values), **dict(where))
    assert done.returncode == 0, done.stderr
    return done.stdout


def parsed(text: str) -> list[Manifest]:
    """The objects of a file. By libyaml: in Python it takes a second, most of it for the CRD."""
    return [item for item in yaml.load_all(text, yaml.CSafeLoader) if item]


def the(objects: list[Manifest], kind: str, name: str | None = None) -> Manifest:
    """The only object of a kind (and name)."""
    found = [item for item in objects if item["kind"] == kind and name in (None, item["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} {kind} {name or ''} in {[(item['kind'], item['metadata']['name']) for item in objects]}"
    return found[0]
