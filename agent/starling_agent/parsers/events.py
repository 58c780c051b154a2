"""Parts of an output, in the order in which they were written."""

import re
from typing import NamedTuple


class Content(NamedTuple):
    """Text for the user."""

    text: str


class Reasoning(NamedTuple):
    """Text that the model wrote for itself."""

    text: str


class CallBegin(NamedTuple):
    """A call of a tool begins; its arguments follow. `id` is the model's own, where its format has one."""

    name: str
    id: str | None = None


class Arguments(NamedTuple):
    """A piece of the JSON object with the arguments of the call that began last."""

    text: str


class CallEnd(NamedTuple):
    """The call that began last is complete, and its arguments are a JSON object. A call that was cut has no end.

    `is_repaired` says that what the model wrote was no JSON.
    """

    is_repaired: bool = False


Event = Content | Reasoning | CallBegin | Arguments | CallEnd


SteadyKind = type[Content] | type[Reasoning] | type[Arguments]


class Steady(NamedTuple):
    """Says that text which `pattern` matches becomes one event, and that nothing else changes: no marker can begin in it."""

    pattern: re.Pattern[str]
    event: SteadyKind
