"""The health script of Argo CD, run as Argo CD's own test of it would: each case of health_test.yaml, in Lua 5.1 as there."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from lupa import lua51

FOLDER = Path(__file__).parents[2] / "deploy/argocd/serving.starling.dev/InferenceService"
CASES = yaml.safe_load((FOLDER / "health_test.yaml").read_text())["tests"]


def _in_lua(lua: lua51.LuaRuntime, value: Any) -> Any:
    if isinstance(value, dict):
        return lua.table_from({key: _in_lua(lua, item) for key, item in value.items()})
    if isinstance(value, list):
        return lua.table_from([_in_lua(lua, item) for item in value])
    return value


def _health(resource: dict[str, Any]) -> dict[str, str]:
    lua = lua51.LuaRuntime(register_eval=False)
    lua.globals().obj = _in_lua(lua, resource)
    return dict(lua.execute((FOLDER / "health.lua").read_text()))


@pytest.mark.parametrize("case", CASES, ids=lambda case: Path(case["inputPath"]).stem)
def test_argo_cd_sees_the_health_of_a_service(case: dict[str, Any]) -> None:
    resource = yaml.safe_load((FOLDER / case["inputPath"]).read_text())
    assert _health(resource) == case["healthStatus"]


def test_each_resource_has_a_case() -> None:
    assert {path.name for path in (FOLDER / "testdata").iterdir()} == {Path(case["inputPath"]).name for case in CASES}
