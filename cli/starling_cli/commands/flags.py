"""Flags that several commands share, so that they are written the same way everywhere."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

Kubeconfig = Annotated[
    Path | None,
    typer.Option("--kubeconfig", help="Default: $KUBECONFIG, ~/.kube/config, or the pod's own account."),
]
Context = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig. Default: its current one.")]
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="Namespace. Default: the context's.")]


class TableOrJson(StrEnum):
    """-o of commands that show a state."""

    TABLE = "table"
    JSON = "json"


Output = Annotated[TableOrJson, typer.Option("-o", "--output", help="For people or for machines.")]
