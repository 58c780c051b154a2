"""docs/kubernetes.md has an entry for each reason that a condition can give."""

import ast
import re
from pathlib import Path

import pytest
from starling_operator.apply import status
from starling_operator.plan import conditions, refusals, verdict

from tests.charts.helm import ROOT

DOCS = (ROOT / "docs/kubernetes.md").read_text()
WORD = re.compile(r"[A-Z][a-z]+(?:[A-Z][a-z]+)*")
NOT_OURS = {"Literal", "True", "False"}


def _words(module: str | None) -> set[str]:
    """What looks like a reason in a module's code, its docstrings left out."""
    assert module is not None
    tree = ast.parse(Path(module).read_text())
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in texts if WORD.fullmatch(text)} - NOT_OURS


REASONS = sorted(_words(verdict.__file__) | _words(refusals.__file__) | {status.REFUSED})


def test_the_reasons_are_found() -> None:
    assert {"Unsupported", "RolloutStalled", "RestartBudgetExhausted", "Serving"} <= set(REASONS)


@pytest.mark.parametrize("reason", [reason for reason in REASONS if reason != "Serving"])
def test_each_reason_of_ready_has_its_heading(reason: str) -> None:
    assert f"#### {reason}\n" in DOCS


def test_no_heading_is_about_a_reason_that_is_gone() -> None:
    assert set(re.findall(r"^#### (\w+)$", DOCS, re.MULTILINE)) <= set(REASONS)


@pytest.mark.parametrize("word", sorted(_words(conditions.__file__)))
def test_each_word_of_the_other_conditions_is_explained(word: str) -> None:
    assert f"`{word}`" in DOCS
