"""The tables of docs/gpu-proofs.md: each test that they name is there, and runs in make test unless its row says otherwise."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "docs" / "gpu-proofs.md").read_text().splitlines()
NAMED = [(path, name, line) for line in LINES for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", line)]


def marked_whole(nodes: list[ast.expr]) -> bool:
    return any(ast.unparse(node) == "pytest.mark.whole" for node in nodes)


def functions_of(path: str) -> dict[str, bool]:
    """Returns the tests of a file; True for those that run in make test-all alone."""
    body = ast.parse((ROOT / path).read_text()).body
    marks = [node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"]
    of_all = marked_whole([each for value in marks for each in (value.elts if isinstance(value, ast.List) else [value])])
    functions = [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.name: of_all or marked_whole(node.decorator_list) for node in functions}


@pytest.mark.parametrize(("path", "name", "line"), NAMED, ids=[name for _, name, _ in NAMED])
def test_a_named_test_is_there_and_runs(path: str, name: str, line: str) -> None:
    tests = functions_of(path)
    assert name in tests
    assert tests[name] == ("`make test-all`" in line)


def test_each_row_names_a_test() -> None:
    rows = [line for line in LINES if line.startswith("| ") and line.count("|") == 3 and not line.startswith("| what ")]
    assert len(rows) > 30 and all("::test_" in row for row in rows)
