"""The chart's values: documented, listed in the schema, refused when they are wrong, and good to lint in every set."""

import itertools
import json
import re
from typing import Any

import pytest
import yaml

from tests.charts.helm import CHART, Helm
from tests.charts.values import REFUSED, SETS

# The first test that needs Helm may have to build it.
pytestmark = pytest.mark.timeout(120, func_only=True)

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())


@pytest.mark.parametrize("name", SETS)
def test_lint_is_silent(helm: Helm, name: str) -> None:
    done = helm.lint(SETS[name])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_value_is_refused_by_its_path(helm: Helm, name: str) -> None:
    values, path = REFUSED[name]
    done = helm.template(values)
    assert done.returncode != 0
    assert re.search(rf"at '/{re.escape(path)}'|at '': .*'{re.escape(path)}'", done.stderr), done.stderr


def test_every_value_has_a_comment() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    bare = [
        line
        for previous, line in itertools.pairwise(lines)
        if re.match(r" *[A-Za-z]+: *\S", line) and not previous.strip().startswith("#") and not _inside_a_value(line)
    ]
    assert bare == []


def _inside_a_value(line: str) -> bool:
    """Lines of a default that is itself a mapping: its comment stands above the whole."""
    return line.strip().split(":")[0] in {"cpu", "memory", "grafana_dashboard"}


def _objects(schema: dict[str, Any]) -> list[dict[str, Any]]:
    inner = [*schema.get("properties", {}).values(), *schema.get("definitions", {}).values()]
    inner += [schema["items"]] if "items" in schema else []
    own = [schema] if "properties" in schema else []
    return own + [found for item in inner for found in _objects(item)]


def test_the_schema_is_closed() -> None:
    assert all(item.get("additionalProperties") is False for item in _objects(SCHEMA))


def test_the_schema_lists_exactly_the_values() -> None:
    assert set(SCHEMA["properties"]) - {"global"} == set(DEFAULTS)
