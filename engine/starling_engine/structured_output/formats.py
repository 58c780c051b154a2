"""Formats: which the library knows, which a pattern says exactly, and which no validator checks.

What only a calendar or a registry can say is left out: there is no pattern of `regex` or `idn-hostname`.
"""

from typing import Any

KNOWN = frozenset(("duration", "ipv4", "ipv6", "uri"))
"""Formats whose expressions in the library accept nothing but what their specifications do."""

UNCHECKED = frozenset(
    (
        # Widths of numbers and kinds of text as OpenAPI's registry and pydantic name them.
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float", "double", "decimal"),
        *("binary", "password", "path", "file-path", "directory-path", "html", "markdown", "commonmark"),
    )
)
"""Formats that no validator checks, and that are removed."""

_SCALAR = r"[A-Za-z0-9\-._~!$&'()*+,;=]|%[0-9A-Fa-f]{2}"
_SEGMENT = f"(?:{_SCALAR}|[:@])"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_LONG_MONTH = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_SHORT_MONTH = "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_DATE = f"(?:[0-9]{{4}}-(?:{_LONG_MONTH}|{_SHORT_MONTH}|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
# A leap second is left out: Python's datetime has none, and when there was one only a table says.
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
# No hyphens third and fourth: a label that begins with xn-- is right only if Punycode says so.
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9]|[A-Za-z0-9-][A-Za-z0-9]|[A-Za-z0-9-](?:[A-Za-z0-9][A-Za-z0-9]|-[A-Za-z0-9])|"
_LABEL += "[A-Za-z0-9-](?:[A-Za-z0-9][A-Za-z0-9-]|-[A-Za-z0-9])[A-Za-z0-9-]{0,58}[A-Za-z0-9])?"
_DOMAIN = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = r"[A-Za-z0-9!#$%&'*+\-/=?^_`{|}~]+"
_HOST = f"(?:{_SCALAR})*"
_AUTHORITY = f"(?:(?:{_SCALAR}|:)*@)?{_HOST}(?::[0-9]*)?"
_PATHS = f"(?://{_AUTHORITY}(?:/{_SEGMENT}*)*|/(?:{_SEGMENT}+(?:/{_SEGMENT}*)*)?"
_TAIL = rf"(?:\?(?:{_SEGMENT}|[/?])*)?(?:#(?:{_SEGMENT}|[/?])*)?"
_URI = f"[A-Za-z][A-Za-z0-9+\\-.]*:{_PATHS}|{_SEGMENT}+(?:/{_SEGMENT}*)*)?{_TAIL}"
_RELATIVE = f"{_PATHS}|(?:{_SCALAR}|@)+(?:/{_SEGMENT}*)*)?{_TAIL}"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_BASE64 = "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"


def _of_version(version: int) -> str:
    return f"[0-9a-fA-F]{{8}}-[0-9a-fA-F]{{4}}-{version}[0-9a-fA-F]{{3}}-[89abAB][0-9a-fA-F]{{3}}-[0-9a-fA-F]{{12}}"


_PATTERNS = {
    "date": _DATE,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "time": _TIME,
    "hostname": _DOMAIN,
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_DOMAIN}",
    "uri-reference": f"(?:{_URI}|{_RELATIVE})",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
    "byte": _BASE64,
    "base64": _BASE64,
    "base64url": _BASE64.replace("+/", "_-"),
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    **{f"uuid{version}": _of_version(version) for version in range(1, 9)},
}
_LENGTHS: dict[str, Any] = {"hostname": {"maxLength": 253}, "email": {"allOf": [{"pattern": "^[^@]{1,64}@[^@]{1,253}$"}]}}
POSSIBLE = sorted({*KNOWN, *_PATTERNS})
"""Formats that are enforced, for messages."""


def as_keywords(name: str) -> dict[str, Any] | None:
    """Returns the keywords that say a format, none for one that is removed, or None for one that is unknown."""
    if name in UNCHECKED:
        return {}
    if name in KNOWN:
        return {"format": name}
    if name not in _PATTERNS:
        return None
    return {"pattern": f"^(?:{_PATTERNS[name]})$", **_LENGTHS.get(name, {})}
