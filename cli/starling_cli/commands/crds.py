"""`starling crds`: the CustomResourceDefinitions of this release."""

import typer


def crds() -> None:
    """Print the CRDs as YAML: `starling crds | kubectl apply --server-side -f -`."""
    from starling_crds.manifest import crd_yaml
    from starling_crds.manifest import crds as all_crds

    typer.echo("---\n".join(crd_yaml(crd) for crd in all_crds().values()), nl=False)
