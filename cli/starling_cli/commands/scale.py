"""`starling scale`: how many groups a service has."""

from typing import Annotated

import typer

from starling_cli.commands.flags import Context, Kubeconfig, Namespace, connected


def scale(
    name: Annotated[str, typer.Argument(help="The InferenceService.")],
    replicas: Annotated[int, typer.Option("--replicas", min=0, max=1000, help="Groups, each a whole copy of the model.")],
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    namespace: Namespace = None,
) -> None:
    """Set the number of groups of a service, as `kubectl scale infsvc NAME --replicas N` does."""

    with connected(kubeconfig, context, namespace) as cluster:
        before = int(cluster.service(name).get("spec", {}).get("replicas", 1))
        cluster.scale(name, replicas)
    change = f"has {replicas} groups as before" if before == replicas else f"goes from {before} to {replicas} groups"
    typer.echo(f"{cluster.namespace}/{name} {change}; follow it with `starling status {name} -n {cluster.namespace}`")
