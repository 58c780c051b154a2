"""`starling agent`: one node of a group. Pods run it, and `starling up` does in place of pods."""

from pathlib import Path
from typing import Annotated

import typer


def agent(
    config: Annotated[Path, typer.Option("--config", help="The node's configuration, which the operator mounts (agent.json).")],
) -> None:
    """Run one node of a group, as its pods do."""
    from starling_agent.node.main import main

    raise typer.Exit(main(config))
