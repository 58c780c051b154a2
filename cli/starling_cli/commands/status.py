"""`starling status`: the operator's status of the services of a namespace, or of one."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from starling_cli.commands.flags import Context, Kubeconfig, Namespace, Output, TableOrJson, connected

if TYPE_CHECKING:
    from rich.console import Console

    from starling_cli.cluster.service_view import ServiceView


def status(
    name: Annotated[str | None, typer.Argument(help="One InferenceService in detail; without it, all in a table.")] = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    namespace: Namespace = None,
    output: Output = TableOrJson.TABLE,
) -> None:
    """Show the services of a namespace. With NAME, exit status 1 unless it is ready."""
    from starling_cli.cluster.service_view import utc_now, view_of

    with connected(kubeconfig, context, namespace) as cluster:
        found = cluster.services() if name is None else [cluster.service(name)]
    views = [view_of(service, utc_now()) for service in found]
    if output is TableOrJson.JSON:
        typer.echo(json.dumps(found if name is None else found[0], indent=2))
    elif name is None:
        _print_table(views, cluster.namespace)
    else:
        _print_one(views[0])
    if name is not None and views[0].ready != "True":
        raise typer.Exit(1)


def _print_table(views: "list[ServiceView]", namespace: str) -> None:
    if not views:
        typer.echo(f"no InferenceService in namespace {namespace}")
        return
    columns = ("NAME", "READY", "REASON", "REPLICAS", "TOPOLOGY", "URL", "AGE")
    rows = [(v.name, v.ready, v.reason, f"{v.serving}/{v.wanted}", v.topology, v.url, v.age) for v in views]
    _console().print(_table(columns, rows))


def _print_one(view: "ServiceView") -> None:
    out = _console()
    facts = [
        ("service", f"{view.namespace}/{view.name}, {view.age} old"),
        ("model", view.model),
        ("ready", f"{view.ready} ({view.reason}) {view.message}".rstrip()),
        ("groups", f"{view.serving} of {view.wanted} serve, {view.topology or 'no topology yet'}"),
        ("revision", view.revision or "none yet"),
        ("url", view.url or "none yet"),
    ]
    for label, text in facts:
        out.print(f"{label:9} {text}", soft_wrap=True, markup=False)
    if not view.up_to_date:
        out.print("this status is older than the last edit: the operator has not seen it yet", markup=False)
    out.print()
    out.print(_table(("CONDITION", "STATUS", "REASON", "MESSAGE"), view.conditions))
    rows = [
        (group.name, "yes" if group.ready else "no", pod, host, phase, str(group.restarts), group.message)
        for group in view.groups
        for pod, host, phase in (group.nodes or (("", "", ""),))
    ]
    if rows:
        out.print()
        out.print(_table(("GROUP", "READY", "POD", "NODE", "PHASE", "RESTARTS", "MESSAGE"), rows))


def _table(columns: tuple[str, ...], rows: Any) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _console() -> "Console":
    from rich.console import Console

    return Console(highlight=False)
