"""`starling plan`: the objects that a manifest becomes, without a cluster."""

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from starling_cli.commands.failures import fail
from starling_cli.commands.flags import Context, Kubeconfig, Namespace, connected

if TYPE_CHECKING:
    from starling_operator.plan.observed import Service

    from starling_cli.planning.difference import Difference
    from starling_cli.planning.planned import PlannedService


CLUSTER = "cluster"


class PlanOutput(StrEnum):
    """-o of `starling plan`."""

    TREE = "tree"
    YAML = "yaml"
    JSON = "json"


def plan(
    file: Annotated[Path, typer.Option("-f", "--file", help="Manifests; - reads standard input.")],
    diff: Annotated[
        str | None,
        typer.Option(
            "--diff",
            metavar="FILE|cluster",
            help="The manifests before the edit, or `cluster` for the services as they are: says what the edit does to them.",
        ),
    ] = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    namespace: Namespace = None,
    output: Annotated[PlanOutput, typer.Option("-o", "--output", help="A tree for people, or manifests.")] = PlanOutput.TREE,
) -> None:
    """Print the children and the layout of ranks of each InferenceService in a file. Exit status 1 for what cannot work."""
    after = _services(file, namespace)
    if diff is not None:
        before = _live(after, kubeconfig, context, namespace) if diff == CLUSTER else _services(Path(diff), namespace)
        _print_differences(before, after, output)
        return
    plans = [_planned(service, file) for service in after.values()]
    if output is PlanOutput.TREE:
        _print_trees(plans)
    else:
        _print_manifests(plans, output)
    for planned in plans:
        if planned.refused:
            typer.secho(f"refused: {planned.service.name}: {planned.refused}", err=True)
    if any(planned.refused for planned in plans):
        raise typer.Exit(1)


def _services(file: Path, namespace: str | None) -> "dict[str, Service]":
    """Returns services by namespace and name; `namespace` is that of manifests without one.

    Ends the command with every problem of every document.
    """
    from starling_cli.local.documents import DocumentError, read_documents
    from starling_cli.local.service_file import service_of

    try:
        documents = [document for document in read_documents(file) if document.is_service]
    except DocumentError as error:
        fail(str(error), "correct the file")
    if not documents:
        fail(f"{file} has no document of kind InferenceService", "see examples/quickstart.yaml")
    found = [(document, service_of(document, namespace)) for document in documents]
    wrong = [f"{document.location}: {service.spec_error}" for document, service in found if service.spec is None]
    if wrong:
        fail("\n       ".join(wrong), "correct the fields that are named; `kubectl explain infsvc.spec` describes them")
    return {f"{service.namespace}/{service.name}": service for _, service in found}


def _live(
    wanted: "dict[str, Service]", kubeconfig: Path | None, context: str | None, namespace: str | None
) -> "dict[str, Service]":
    """Returns those wanted services that the cluster has. A manifest without a namespace is looked up in the flags' one."""
    from dataclasses import replace

    from starling_crds.parse import parse_spec

    from starling_cli.local.service_file import DEFAULT_NAMESPACE

    found = {}
    with connected(kubeconfig, context, namespace) as cluster:
        usual = cluster.namespace
        for key, service in wanted.items():
            cluster.namespace = usual if service.namespace == DEFAULT_NAMESPACE else service.namespace
            body = next((each for each in cluster.services() if each["metadata"]["name"] == service.name), None)
            if body is None:
                continue
            parsed = parse_spec(body["spec"])
            if parsed.spec is None:
                fail(f"the cluster's {service.name} cannot be read by this release: {parsed.error}", "upgrade it, or this command")
            found[key] = replace(service, spec=parsed.spec)
    return found


def _planned(service: "Service", file: Path) -> "PlannedService":
    from starling_agent.version import starling_version

    from starling_cli.planning.planned import CannotPlan, plan_of

    try:
        return plan_of(service, f"starling-agent:{starling_version()}")
    except CannotPlan as error:
        fail(f"{file}: {service.name}: {error}", "correct the field that is named")


def _print_trees(plans: "list[PlannedService]") -> None:
    from starling_cli.planning.drawing import draw

    for planned in plans:
        typer.echo("\n".join(draw(planned).lines()))


def _print_manifests(plans: "list[PlannedService]", output: PlanOutput) -> None:
    import yaml

    children: list[dict[str, Any]] = [child for planned in plans for child in planned.children]
    if output is PlanOutput.JSON:
        typer.echo(json.dumps({"apiVersion": "v1", "kind": "List", "items": children}, indent=2))
    else:
        typer.echo(yaml.safe_dump_all(children, sort_keys=False, allow_unicode=True), nl=False)


def _print_differences(before: "dict[str, Service]", after: "dict[str, Service]", output: PlanOutput) -> None:
    from dataclasses import asdict

    from starling_cli.planning.difference import difference

    found = [difference(before.get(key), after.get(key)) for key in dict.fromkeys((*before, *after))]
    if output is PlanOutput.TREE:
        typer.echo("\n".join(line for entry in found for line in _describe(entry)))
    elif output is PlanOutput.JSON:
        typer.echo(json.dumps([asdict(entry) for entry in found], indent=2))
    else:
        import yaml

        typer.echo(yaml.safe_dump([json.loads(json.dumps(asdict(entry))) for entry in found], sort_keys=False), nl=False)


def _describe(entry: "Difference") -> list[str]:
    effects = entry.effects or ("nothing changes",)
    return [f"{entry.service}: {'; '.join(effects)}", *(f"  {change}" for change in entry.changes)]
