"""The `starling` command: `starling` calls it in this process, which is quick; `starling_process` as a user does."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from starling_cli.main import app
from typer.testing import CliRunner

REPOSITORY = Path(__file__).parents[3]
ENVIRONMENT = {"COLUMNS": "200", "NO_COLOR": "1", "KUBECONFIG": "/nonexistent", "KUBERNETES_SERVICE_HOST": None}
"""No cluster is configured; a flag may name one."""


@dataclass
class Answer:
    """Result of a command, as of subprocess.run."""

    returncode: int
    stdout: str
    stderr: str


def starling(*arguments, input=None, **environment):
    result = CliRunner().invoke(app, [*map(str, arguments)], input=input, env=ENVIRONMENT | environment)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Answer(result.exit_code, result.stdout, result.stderr)


def starling_process(*arguments, **environment):
    command = [sys.executable, "-m", "starling_cli.main", *map(str, arguments)]
    merged = {name: value for name, value in (os.environ | ENVIRONMENT | environment).items() if value is not None}
    return subprocess.run(command, cwd=REPOSITORY, env=merged, capture_output=True, text=True, timeout=90)
