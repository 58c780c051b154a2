"""Help of commands in plain text: every flag is whole in a terminal of 80 columns, where a table of rich's would cut it."""

from typing import Any

from typer.core import TyperCommand


class PlainCommand(TyperCommand):
    """Lists flags under the headings of their panels."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(record)
        for panel, records in panels.items():
            with formatter.section(panel):
                formatter.write_dl(records)
