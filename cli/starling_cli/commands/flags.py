"""Flags that several commands share, and the connection to the cluster that they choose."""

import contextlib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from starling_cli.cluster.client import Access, Cluster, ClusterError
from starling_cli.commands.failures import fail

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


@contextlib.contextmanager
def connected(kubeconfig: Path | None, context: str | None, namespace: str | None) -> Iterator[Cluster]:
    """Connects to the cluster for the length of a command, which a failed call ends."""
    try:
        yield Cluster(Access(kubeconfig, context, namespace))
    except ClusterError as error:
        fail(str(error), error.fix)
