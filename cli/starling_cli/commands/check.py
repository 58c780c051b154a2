"""`starling check`: is the cluster (or this machine) fit, and is Starling at work on it?"""

import json
from typing import Annotated

import typer

from starling_cli.commands.flags import Context, Kubeconfig, Namespace, Output, TableOrJson, connected


def check(
    pre: Annotated[bool, typer.Option("--pre", help="Before the installation: can Starling be installed?")] = False,
    machine: Annotated[bool, typer.Option("--machine", help="This machine, for `starling up`, and no cluster.")] = False,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    namespace: Namespace = None,
    output: Output = TableOrJson.TABLE,
) -> None:
    """Look at the cluster, or without one at this machine. Exit status 1 when anything is wrong."""
    from starling_cli.checking.cluster import check_before, check_installed
    from starling_cli.checking.finding import as_json, lines
    from starling_cli.checking.machine import check_machine
    from starling_cli.cluster.client import Access

    access = Access(kubeconfig, context, namespace)
    asked_for_cluster = pre or any((kubeconfig, context, namespace)) or access.is_configured
    if machine or not asked_for_cluster:
        findings = list(check_machine())
    else:
        with connected(kubeconfig, context, namespace) as cluster:
            findings = list(check_before(cluster) if pre else check_installed(cluster))
    if output is TableOrJson.JSON:
        typer.echo(json.dumps(as_json(findings), indent=2, ensure_ascii=False))
    else:
        typer.echo("\n".join(lines(findings)))
        if not (machine or asked_for_cluster):
            typer.echo("\nno cluster is configured, so this machine was looked at; --kubeconfig names a cluster")
    if any(finding.state == "bad" for finding in findings):
        raise typer.Exit(1)
