"""The `starling` command as a user calls it."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]


def starling(*arguments, input=None, **environment):
    """Without a cluster, unless KUBECONFIG is given."""
    command = [sys.executable, "-m", "starling_operator.cli", *map(str, arguments)]
    fixed = {"COLUMNS": "200", "NO_COLOR": "1", "KUBECONFIG": "/nonexistent"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KUBERNETES_")}
    return subprocess.run(
        command, cwd=REPOSITORY, env=inherited | fixed | environment, input=input, capture_output=True, text=True, timeout=90
    )
