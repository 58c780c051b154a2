"""`spec.endpoint`: the OpenAI endpoint that clients see."""

from typing import Literal

from pydantic import Field
from starling_crds.rules import Rule
from starling_crds.v1alpha1.base import ApiModel
from starling_crds.v1alpha1.model import SecretKey
from starling_crds.v1alpha1.route import RouteSpec
from starling_crds.v1alpha1.strings import AbsolutePath, HostName, ObjectName, Origin, ParserName, Rate, Size


class LimitsSpec(ApiModel):
    """Limits of each client at each pod; every pod counts by itself."""

    rate: Rate | None = Field(
        default=None,
        description=(
            "Requests of each API key (without keys: of each address, which behind a proxy is the proxy's): 10/s, 600/m, 100/30s."
            " Further ones get 429. Default: any."
        ),
    )
    max_body_bytes: Size = Field(default="32Mi", description="Largest request body; larger ones get 413.")
    read_seconds: int = Field(
        default=20,
        ge=1,
        le=3600,
        description="A request's header must come within so long, then 408; its body too, with a second more for each KiB of it.",
    )
    connection_seconds: int = Field(
        default=120,
        ge=0,
        le=86_400,
        description=(
            "A connection is closed with an answer once it is half to all of it old, so that clients that keep theirs come to new"
            " groups as well; no stream is cut. 0: never."
        ),
    )


class ResponseStoreSpec(ApiModel):
    """Room for responses of /v1/responses: each pod's memory, or with a path or a claim a folder that pods share."""

    RULES = (
        Rule(
            field="claim",
            cel="!(has(self.path) && has(self.claim))",
            holds=lambda store: store.path is None or store.claim is None,
            message="at most one of path and claim is possible; remove path ({path}) or claim ({claim})",
        ),
    )

    bytes: Size = Field(
        default="64Mi",
        description="Room in each pod's memory, or in the folder in all; older responses make room for later ones.",
    )
    seconds: int = Field(default=2_592_000, ge=1, le=315_360_000, description="A response is stored for so long. Default: 30 days.")
    path: AbsolutePath | None = Field(
        default=None,
        description=(
            "Absolute folder on each node, which user 65532 can write to; needs a namespace that allows hostPath volumes. Pods on"
            " several nodes share it if it is of a file system that all nodes mount."
        ),
    )
    claim: ObjectName | None = Field(
        default=None,
        description="Name of a PersistentVolumeClaim in this namespace; ReadWriteMany for pods on several nodes.",
    )


class EndpointSpec(ApiModel):
    """The Service in front of all ready nodes, and the requirements of each node's endpoint."""

    port: int = Field(default=80, ge=1, le=65_535, description="Port of the Service; pods listen on 8000.")
    api_key_secret: SecretKey | None = Field(
        default=None, description="Secret key with the API keys, one a line, of which a request must bring one. Default: open."
    )
    allowed_origins: list[Origin] = Field(
        default_factory=list,
        max_length=64,
        json_schema_extra={"x-kubernetes-list-type": "set"},
        description="Origins of pages whose scripts may call the endpoint (CORS), or *.",
    )
    allowed_hosts: list[HostName] = Field(
        default_factory=list,
        max_length=64,
        json_schema_extra={"x-kubernetes-list-type": "set"},
        description="Names in requests' Host, also *.NAME, besides those of the Service, addresses and localhost. Default: any.",
    )
    prefix_cache_salt: Literal["key", "none"] = Field(
        default="key",
        description="key: with API keys, a cached prefix is found only with the key that it was sent with. none: with any.",
    )
    tool_call_parser: ParserName = Field(
        default="auto",
        description="Format in which the model calls tools, by vLLM's names. auto: its chat template's. none: calls are text.",
    )
    reasoning_parser: ParserName = Field(
        default="auto", description="Format that marks the model's reasoning. auto: that of its chat template. none: it is content."
    )
    whole_tool_calls: bool = Field(
        default=False,
        description="A tool call is sent when it is complete, and one that was cut is not. Default: as it is written.",
    )
    response_store: ResponseStoreSpec = Field(
        default_factory=ResponseStoreSpec,
        description="Responses of /v1/responses that can be fetched and continued. A folder holds them as plain text.",
    )
    limits: LimitsSpec = Field(default_factory=LimitsSpec, description="What a client may ask of each pod.")
    route: RouteSpec | None = Field(
        default=None, description="An HTTPRoute to this service, where the Gateway API is installed. Default: none is created."
    )
    tls_secret: ObjectName | None = Field(
        default=None, description="Name of a kubernetes.io/tls Secret; the pods then serve HTTPS."
    )
