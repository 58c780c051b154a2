"""`starling crds`: the CustomResourceDefinition of this release."""

import typer


def crds() -> None:
    """Print the CRD as YAML: `starling crds | kubectl apply --server-side -f -`."""
    import yaml
    from starling_crds.manifest import inferenceservice_crd

    typer.echo(yaml.safe_dump(inferenceservice_crd(), sort_keys=False, allow_unicode=True, width=120), nl=False)
