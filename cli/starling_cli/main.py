"""The `starling` command.

Only typer is imported here and at the top of the commands: `starling --help` must answer at once, and torch, transformers or an
OpenAI client take seconds to import.
"""

from typing import Annotated, Any

import typer
from starling_engine.core import launcher
from typer.core import TyperGroup

from starling_cli.commands import (
    agent,
    bench,
    chat,
    check,
    crds,
    kv,
    operator,
    plan,
    quantize,
    router,
    scale,
    serve,
    status,
    support_bundle,
    up,
)
from starling_cli.commands.vllm_flags import ServeCommand
from starling_cli.plain_help import PlainCommand


class RootGroup(TyperGroup):
    """All commands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Starts the process of an engine core before flags are read: typer imports pydantic for them, which takes 0.2 s."""
        if args[:1] == ["serve"] and not ctx.resilient_parsing and not set(ctx.help_option_names) & set(args):
            launcher.start_ahead()
            ctx.call_on_close(launcher.end_ahead)  # after a wrong flag it ends with this process
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="starling",
    cls=RootGroup,
    help="Serves large language models: one process here, or groups of pods on Kubernetes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Without rich, whose import is two thirds of the time that `starling --help` would take.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve", cls=ServeCommand)(serve.serve)
app.command("agent", cls=PlainCommand)(agent.agent)
app.command("operator", cls=PlainCommand)(operator.operator)
app.command("chat", cls=PlainCommand)(chat.chat)
app.command("quantize", cls=PlainCommand)(quantize.quantize)
app.command("router", cls=PlainCommand)(router.router)
app.command("up", cls=PlainCommand)(up.up)
app.command("plan", cls=PlainCommand)(plan.plan)
app.command("status", cls=PlainCommand)(status.status)
app.command("scale", cls=PlainCommand)(scale.scale)
app.command("check", cls=PlainCommand)(check.check)
app.command("crds", cls=PlainCommand)(crds.crds)
app.command("support-bundle", cls=PlainCommand)(support_bundle.support_bundle)
app.add_typer(bench.app, name="bench")
app.add_typer(kv.app, name="kv")


def _print_version(wanted: bool) -> None:
    if wanted:
        from starling_agent.version import starling_version

        typer.echo(f"starling {starling_version()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    del version  # handled by its callback


def main() -> None:
    app()


if __name__ == "__main__":
    main()
