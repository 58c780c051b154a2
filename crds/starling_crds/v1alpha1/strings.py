"""Strings of the API that have a form. Each says in its message what is possible, with an example."""

import re
from typing import Annotated

from pydantic import Field
from starling_crds.duration import PATTERN as DURATION
from starling_crds.quantity import PATTERN as SIZE
from starling_crds.rate import PATTERN as RATE
from starling_crds.rules import Rule, must_match, must_not_match

_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_HUB_NAME = "[A-Za-z0-9_][A-Za-z0-9_.-]*"
_STEPS_UP = must_not_match(r"(^|/)\.\.(/|$)", "must not climb by ..")

SERVICE_NAME = must_match(
    "^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$",
    "must be at most 40 lowercase letters, digits and '-', begin with a letter and end with a letter or digit",
)
"""DNS-1035, and short enough that the names of pods and labels made from it fit into 63 characters."""

ObjectName = Annotated[
    str,
    Field(min_length=1, max_length=253),
    must_match(f"^{_SUBDOMAIN}$", "must be the name of an object: lowercase letters, digits, '-' and '.', such as my-secret"),
]
ClassName = Annotated[
    str,
    Field(min_length=1, max_length=40),
    must_match(f"^{_LABEL}$", "must be lowercase letters, digits and '-', such as blue"),
]
DataKey = Annotated[
    str,
    Field(min_length=1, max_length=253),
    must_match("^[-._a-zA-Z0-9]+$", "must be a key of a Secret: letters, digits, '-', '_' and '.', such as api-keys"),
]
TenantName = Annotated[
    str,
    Field(min_length=1, max_length=63),
    must_match(f"^{_LABEL}$", "must be lowercase letters, digits and '-', with a letter or digit at both ends, such as chat"),
]
Size = Annotated[
    str,
    Field(max_length=32),
    must_match(SIZE, "must be bytes or a quantity such as 4Gi or 500M"),
    must_match("^.*[1-9].*$", "must be above 0"),
]
Amount = Annotated[
    str,
    Field(max_length=32),
    must_match(
        r"^[0-9]+(\.[0-9]+)?(m|Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?$", "must be a quantity, a number of them in quotes, such as 500m or 4Gi"
    ),
]
ParserName = Annotated[
    str,
    Field(min_length=1, max_length=64),
    must_match("^[a-z0-9_]+$", "must be auto, none, or the name of a format, such as hermes"),
]
ClassifierTokens = Annotated[
    str,
    Field(max_length=128),
    must_match("^[^,]*[^, ][^,]*(,[^,]*[^, ][^,]*)?$", "must be one token, or two with a comma between them, such as no,yes"),
]
Rate = Annotated[str, Field(max_length=32), must_match(RATE, "must be a rate such as 10/s, 600/m or 100/30s")]
AbsolutePath = Annotated[
    str, Field(max_length=1024), must_match("^/[^/].*$", "must be an absolute folder below /, such as /var/lib/starling"), _STEPS_UP
]
ModelSource = Annotated[
    str,
    Field(max_length=1024),
    must_match(
        f"^(hf://{_HUB_NAME}/{_HUB_NAME}(:[A-Za-z0-9_./-]+[.]gguf)?(@[A-Za-z0-9_./-]+)?|pvc://{_SUBDOMAIN}/[^/].*|file:///[^/].*)$",
        "must be hf://org/name[:file.gguf][@revision], pvc://claim/path or file:///path",
    ),
    _STEPS_UP,
]
ModelName = Annotated[
    str,
    Field(min_length=1, max_length=256),
    must_match(r"^[^\s]+$", "must be a name without white space, such as chat or org/chat"),
]
Image = Annotated[
    str,
    Field(min_length=1, max_length=1024),
    must_match(r"^[^\s]+$", "must be an image without white space, such as ghcr.io/org/starling-agent:0.2.0"),
]
StoreUrl = Annotated[
    str,
    Field(max_length=1024),
    must_match(
        r"^mooncake://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}(\?[^\s]*)?$",
        "must be mooncake://MASTER:PORT, such as mooncake://starling-mooncake.starling-system:50051",
    ),
]
Origin = Annotated[
    str,
    Field(max_length=512),
    must_match(r"^(\*|https?://[^/\s]+)$", "must be * or an origin without a path, such as https://chat.example.org"),
]
HostName = Annotated[
    str,
    Field(min_length=1, max_length=253),
    must_match(rf"^(\*\.)?{_SUBDOMAIN}$", "must be a name without scheme and port, such as chat.example.org or *.example.org"),
]
ApiGroup = Annotated[
    str,
    Field(max_length=253),
    must_match(f"^({_SUBDOMAIN})?$", "must be an API group, such as gateway.networking.k8s.io, or empty for the core's"),
]
KindName = Annotated[
    str,
    Field(min_length=1, max_length=63),
    must_match("^[a-zA-Z]([-a-zA-Z0-9]*[a-zA-Z0-9])?$", "must be a kind, such as Gateway"),
]
Duration = Annotated[
    str,
    Field(max_length=32),
    must_match(DURATION, "must be up to four numbers with their units h, m, s or ms, such as 30s or 1h30m"),
]
Cidr = Annotated[
    str,
    Field(max_length=64),
    must_match("^[0-9A-Fa-f.:]+/[0-9]{1,3}$", "must be a range of addresses, such as 10.0.0.0/24 or fd00::/64"),
]
DeviceResource = Annotated[
    str,
    Field(min_length=1, max_length=253),
    must_match(
        f"^(cpu|{_SUBDOMAIN}/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)$",
        "must be cpu or an extended resource with its domain, such as nvidia.com/gpu",
    ),
]
LabelValue = Annotated[
    str,
    Field(max_length=63),
    must_match(
        "^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$",
        "must be a label's value: letters, digits, '-', '_' and '.', with a letter or digit at both ends",
    ),
]
_LABEL_KEY = rf"^({_SUBDOMAIN}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?$"
LABEL_KEYS = Rule(
    cel=f"self.all(key, key.matches(r'{_LABEL_KEY}') && size(key.split('/')[0]) <= 253)",
    holds=lambda labels: all(re.fullmatch(_LABEL_KEY, key) and len(key.split("/")[0]) <= 253 for key in labels),
    message="must have labels' keys: letters, digits, '-', '_' and '.', with a domain and '/' before them or none",
)
"""Rule of a map of labels: the API server would refuse the object that has them."""
