"""Pages of other origins, where a browser lets them send without asking."""

from collections.abc import Collection, Mapping

from starling_agent.http.errors import ApiError


def check_origin(headers: Mapping[str, str], allowed: Collection[str]) -> None:
    """Raises ApiError 403 for a request that a page of another origin sends. Programs send no such header and always pass.

    For routes that take no body: any page may send a POST without one. It cannot read the answer, but the work is done by then.
    """
    if is_foreign(headers, allowed):
        page = headers.get("origin", "another site")[:200]
        message = f"a page of {page!r} may not do this; pages of this host may, and those of allowed origins (--allowed-origins)"
        raise ApiError(403, message, code="origin_not_allowed")


def is_foreign(headers: Mapping[str, str], allowed: Collection[str]) -> bool:
    """`headers` by names in lower case; `allowed` are origins as they send themselves, or * for all."""
    origin = headers.get("origin")
    if "*" in allowed or origin in allowed:
        return False
    if origin is None:
        return headers.get("sec-fetch-site") == "cross-site"
    return not origin.endswith(f"://{headers.get('host', '')}")
