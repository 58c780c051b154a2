"""From a command's flags to a connection, and from a failed call to the command's last words."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from starling_cli.cluster.client import Access, Cluster, ClusterError
from starling_cli.commands.failures import fail


@contextlib.contextmanager
def connected(kubeconfig: Path | None, context: str | None, namespace: str | None) -> Iterator[Cluster]:
    """The cluster for the length of a command."""
    try:
        yield Cluster(Access(kubeconfig, context, namespace))
    except ClusterError as error:
        fail(str(error), error.fix)
