"""The texts of calls in the history, as models wrote them, for chat templates that do not show calls by themselves."""

from starling_engine.frontend.shown_tools import ShownCalls

from starling_agent.parsers.reading import Family
from starling_agent.parsers.written_arguments import python_arguments
from starling_agent.parsers.written_calls import NAME, json_arguments


def shown_calls(family: Family) -> ShownCalls | None:
    """Returns the texts around calls and their parts; None where arguments are neither JSON nor Python's."""
    written = family.written
    if written is None or written.arguments not in (json_arguments, python_arguments):
        return None
    opens, closes, between = written.opens, written.closes, ""
    begins, named = written.begins.split(NAME)
    ends = written.ends
    if "]" in ends:  # a list, of which calls of one message have one
        opening, begins = begins.split("[")
        ends, closing = ends.split("]")
        opens, closes, between = f"{opens}{opening}[", f"]{closing}{closes}", ", "
    as_python = written.arguments is python_arguments
    return ShownCalls(opens, begins, named, ends, between, closes, family.answer_role, as_python)
