"""Fields of the queries of stored responses: which events are followed, which items are listed, and what goes with them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from starlette.datastructures import QueryParams
from starling_engine.errors import InvalidRequest

from starling_agent.openai.responses.listed_items import listed_item
from starling_agent.openai.responses.protocol import Include

Query = Mapping[str, str]
ITEMS, MOST_ITEMS = "20", 100


def events_after(query: Query) -> int | None:
    """Returns the number of the event behind which a stream begins; None: no stream is asked for. Raises InvalidRequest."""
    streams, after = _one_of(query, "stream", ("false", "true")) == "true", query.get("starting_after")
    if not streams and after is not None:
        raise InvalidRequest("takes stream=true", "starting_after")
    if after is not None and not re.fullmatch(r"-1|[0-9]{1,9}", after):
        raise InvalidRequest(f"must be the number of an event, got {after[:100]!r}", "starting_after")
    return int(after or -1) if streams else None


def check_shown(query: QueryParams) -> None:
    """Raises InvalidRequest for what no answer has. Known values of `include` change nothing: all that is stored is shown."""
    possible = get_args(Include)
    for name in ("include", "include[]"):
        for value in query.getlist(name):
            if value not in possible:
                raise InvalidRequest(f"must be {' or '.join(possible)}, got {value[:100]!r}", name)
    if query.get("include_obfuscation", "false") != "false":
        raise InvalidRequest("must be false: events are never padded", "include_obfuscation")


def page_of(items: Sequence[Mapping[str, Any]], query: Query) -> dict[str, Any]:
    """Returns the list of those items that are asked for: as OpenAI's API the newest 20 at first. Raises InvalidRequest."""
    limit, order, after = query.get("limit", ITEMS), _one_of(query, "order", ("desc", "asc")), query.get("after")
    if not re.fullmatch(r"[0-9]{1,3}", limit) or not 1 <= int(limit) <= MOST_ITEMS:
        raise InvalidRequest(f"must be a number from 1 to {MOST_ITEMS}, got {limit[:100]!r}", "limit")
    named = [listed_item(item, i) for i, item in enumerate(items)]
    if order == "desc":
        named.reverse()
    ids = [item["id"] for item in named]
    if after is not None and after not in ids:
        raise InvalidRequest(f"there is no item {after[:100]!r}", "after")
    begin = 0 if after is None else ids.index(after) + 1
    page = named[begin : begin + int(limit)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, "has_more": begin + len(page) < len(named), **ends}


def _one_of(query: Query, name: str, possible: tuple[str, str]) -> str:
    """Returns a value; without one the first that is possible."""
    value = query.get(name, possible[0])
    if value not in possible:
        raise InvalidRequest(f"must be {' or '.join(possible)}, got {value[:100]!r}", name)
    return value
