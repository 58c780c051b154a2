"""`spec.endpoint.route`: a Gateway's way to the endpoint, in the Gateway API's own words."""

from typing import Annotated, Literal

from pydantic import Field
from starling_crds.duration import milliseconds
from starling_crds.rules import Rule
from starling_crds.v1alpha1.base import ApiModel
from starling_crds.v1alpha1.strings import LABEL_KEYS, ApiGroup, Cidr, Duration, HostName, KindName, LabelValue, ObjectName

GATEWAYS, GATEWAY = "gateway.networking.k8s.io", "Gateway"
MOST_LABEL = 63
"""Characters that a label's value may have."""


class ParentReference(ApiModel):
    """A Gateway that a route belongs to."""

    group: ApiGroup | None = Field(default=None, description="Default: gateway.networking.k8s.io.")
    kind: KindName | None = Field(default=None, description="Default: Gateway.")
    namespace: ObjectName | None = Field(default=None, description="Default: the service's own.")
    name: ObjectName = Field(description="Name of the Gateway.")
    section_name: ObjectName | None = Field(default=None, description="Name of one of its listeners. Default: all.")
    port: int | None = Field(default=None, ge=1, le=65_535, description="Only listeners of this port.")

    @property
    def is_gateway(self) -> bool:
        return self.group in (None, GATEWAYS) and self.kind in (None, GATEWAY)


class RouteTimeouts(ApiModel):
    """Times after which the Gateway gives a request up, as in an HTTPRoute; 0s: never."""

    RULES = (
        Rule(
            field="backendRequest",
            cel=(
                "!has(self.backendRequest) || duration(self.request) == duration('0s')"
                " || duration(self.backendRequest) <= duration(self.request)"
            ),
            holds=lambda timeouts: (
                timeouts.backend_request is None
                or milliseconds(timeouts.request) == 0
                or milliseconds(timeouts.backend_request) <= milliseconds(timeouts.request)
            ),
            message="must be at most request ({request}), which it is a part of, got {backendRequest}",
        ),
    )

    request: Duration = Field(
        default="0s", description="Until its answer has ended, all of a stream included. Gateways have 15 to 60 s by themselves."
    )
    backend_request: Duration | None = Field(default=None, description="The same of one try. Default: only request counts.")


class GatewayProxies(ApiModel):
    """Senders of a Gateway's requests: pods, or addresses outside the cluster."""

    RULES = (
        Rule(
            field="cidr",
            cel="has(self.cidr) != (has(self.namespace) || has(self.labels))",
            holds=lambda proxies: (proxies.cidr is not None) != (proxies.namespace is not None or proxies.labels is not None),
            message="must be set where neither namespace nor labels are, and only there",
        ),
    )

    namespace: ObjectName | None = Field(default=None, description="Namespace of its pods. Default: the service's own.")
    labels: Annotated[dict[str, LabelValue], Field(max_length=16), LABEL_KEYS] | None = Field(
        default=None, description="Labels of its pods. Default: all pods."
    )
    cidr: Cidr | None = Field(default=None, description="Range of its addresses, where it runs in no pods of this cluster.")


class RouteSpec(ApiModel):
    """An HTTPRoute that leads all paths to the Service, or to an InferencePool for which the routers pick."""

    RULES = (
        Rule(
            field="failureMode",
            cel="self.failureMode == 'FailClose' || self.backend == 'InferencePool'",
            holds=lambda route: route.failure_mode == "FailClose" or route.backend == "InferencePool",
            message="must be FailClose without backend InferencePool, whose picker is what may fail",
        ),
        Rule(
            field="secureServing",
            cel="self.secureServing || self.backend == 'InferencePool'",
            holds=lambda route: route.secure_serving or route.backend == "InferencePool",
            message="must be true without backend InferencePool: nothing else is served without TLS by it",
        ),
        Rule(
            field="proxies",
            cel="self.backend == 'InferencePool' || !has(self.proxies) || size(self.proxies) == 0",
            holds=lambda route: route.backend == "InferencePool" or not route.proxies,
            message="is possible with backend InferencePool alone; the Service's port is open to all pods",
        ),
        Rule(
            field="proxies",
            cel=(
                "self.backend == 'Service' || (has(self.proxies) && size(self.proxies) > 0)"
                f" || self.parentRefs.all(parent, size(parent.name) <= {MOST_LABEL}"
                f" || (has(parent.group) && parent.group != '{GATEWAYS}') || (has(parent.kind) && parent.kind != '{GATEWAY}'))"
            ),
            holds=lambda route: (
                route.backend == "Service"
                or bool(route.proxies)
                or all(len(parent.name) <= MOST_LABEL or not parent.is_gateway for parent in route.parent_refs)
            ),
            message=f"must say whose a Gateway is whose name has more than {MOST_LABEL} characters: its pods' label cannot have it",
        ),
    )

    parent_refs: list[ParentReference] = Field(
        min_length=1,
        max_length=32,
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
        description="The Gateways that it hangs on, as in an HTTPRoute.",
    )
    hostnames: list[HostName] = Field(
        default_factory=list,
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "set"},
        description="Names that it answers to, also *.NAME. Default: those of the listeners.",
    )
    timeouts: RouteTimeouts = Field(default_factory=RouteTimeouts, description="When the Gateway gives a request up.")
    backend: Literal["Service", "InferencePool"] = Field(
        default="Service",
        description=(
            "Service: requests go through the Service, and the routers if there are any. InferencePool: the Gateway carries them to"
            " the agents itself, and asks the routers where each goes; needs the Gateway API Inference Extension."
        ),
    )
    failure_mode: Literal["FailClose", "FailOpen"] = Field(
        default="FailClose",
        description=(
            "What the Gateway does while no router picks. FailClose: it refuses requests. FailOpen: it sends them to any agent, so"
            " that agents answer all who have a key, not routers alone."
        ),
    )
    secure_serving: bool = Field(
        default=True,
        description=(
            "The Gateway asks the routers to pick by TLS, as Inference Extension has it, and does not verify the certificate, which"
            " each router makes for itself. False: in plain text, for Gateways that ask so."
        ),
    )
    proxies: list[GatewayProxies] = Field(
        default_factory=list,
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
        description=(
            "Who may ask the routers to pick. Default: in the namespaces of the Gateways, pods with their name in the label"
            " gateway.networking.k8s.io/gateway-name."
        ),
    )
