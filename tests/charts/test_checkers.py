"""Findings of checkers in the chart and in services are those that docs/kubernetes.md has, with the reasons why they stay."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.charts.helm import ROOT, Helm
from tests.cli.commands.running import starling

CACHE = Path(os.environ.get("STARLING_CACHE") or Path.home() / ".cache" / "starling")
CHECKOV = CACHE / "checkov-3.3.30" / "bin" / "checkov"
KUBE_SCORE = CACHE / "kube-score-1.20.0" / "kube-score"
EXAMPLES = ("multi-group", "router")
CHAPTER = (ROOT / "docs" / "kubernetes.md").read_text().partition("### What checkers say\n")[2].partition("\n## ")[0]
ROWS = [[cell.strip() for cell in line.split("|")] for line in CHAPTER.splitlines() if line.startswith("| ")][1:]
FLAWLESS = 10
"""A grade of kube-score's."""

pytestmark = pytest.mark.whole


@pytest.fixture
def files(helm: Helm, tmp_path: Path) -> list[str]:
    """The chart as it comes, and the children of two services."""
    rendered = helm.template({})
    assert rendered.returncode == 0, rendered.stderr
    texts = {"all": rendered.stdout}
    for name in EXAMPLES:
        planned = starling("plan", "-f", ROOT / "examples" / f"{name}.yaml", "-n", "prod", "-o", "yaml")
        assert planned.returncode == 0, planned.stderr
        texts[name] = planned.stdout
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return [str(tmp_path / f"{name}.yaml") for name in texts]


def documented(column: int) -> set[str]:
    return {row[column] for row in ROWS} - {""}


@pytest.mark.skipif(not CHECKOV.exists(), reason="needs checkov: make checkers")
def test_checkov_finds_what_is_documented(files: list[str]) -> None:
    options = ("--framework", "kubernetes", "--compact", "--skip-download", "--output", "json")
    done = subprocess.run([CHECKOV, *options, "--file", *files], capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert report["summary"]["parsing_errors"] == 0 and report["summary"]["passed"] > 100
    assert {check["check_id"] for check in report["results"]["failed_checks"]} == documented(2)
    (left_out,) = re.findall(r"--skip-check (\S+)", CHAPTER)
    assert set(left_out.split(",")) == documented(2), "the command that is documented ends with 0"


@pytest.mark.skipif(not KUBE_SCORE.exists(), reason="needs kube-score: make checkers")
def test_kube_score_finds_what_is_documented(files: list[str]) -> None:
    done = subprocess.run([KUBE_SCORE, "score", *files, "--output-format", "json"], capture_output=True, text=True, check=False)
    checks = [check for each in json.loads(done.stdout) for check in each["checks"] if not check["skipped"]]
    assert {check["check"]["id"] for check in checks if check["grade"] < FLAWLESS} == documented(3)
