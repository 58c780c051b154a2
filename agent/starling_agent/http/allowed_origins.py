"""Requests of web pages from other origins, which a browser sends without a preflight."""

from collections.abc import Collection, Mapping

from starling_agent.http.errors import ApiError


def check_origin(headers: Mapping[str, str], allowed: Collection[str]) -> None:
    """Raises ApiError 403 for a request from a page of another origin. Programs send no such header and always pass.

    Needed for routes without a body: any page may send a POST without one. It cannot read the answer, but has its effect.
    """
    if is_cross_origin(headers, allowed):
        page = headers.get("origin", "another site")[:200]
        message = f"a page of {page!r} may not do this; pages of this host may, and those of allowed origins (--allowed-origins)"
        raise ApiError(403, message, code="origin_not_allowed")


def is_cross_origin(headers: Mapping[str, str], allowed: Collection[str]) -> bool:
    """`headers` are by names in lower case; `allowed` are values of Origin headers, or * for all."""
    origin = headers.get("origin")
    if "*" in allowed or origin in allowed:
        return False
    if origin is None:
        return headers.get("sec-fetch-site") == "cross-site"
    return not origin.endswith(f"://{headers.get('host', '')}")
