"""`starling crds`: the CustomResourceDefinition of this release."""

import typer


def crds() -> None:
    """Print the CRD as YAML: `starling crds | kubectl apply --server-side -f -`."""
    from starling_crds.manifest import crd_yaml

    typer.echo(crd_yaml(), nl=False)
