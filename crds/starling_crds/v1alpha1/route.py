"""`spec.endpoint.route`: a Gateway's way to the endpoint, in the Gateway API's own words."""

from pydantic import Field
from starling_crds.v1alpha1.base import ApiModel
from starling_crds.v1alpha1.strings import ApiGroup, HostName, KindName, ObjectName


class ParentReference(ApiModel):
    """A Gateway that a route belongs to."""

    group: ApiGroup | None = Field(default=None, description="Default: gateway.networking.k8s.io.")
    kind: KindName | None = Field(default=None, description="Default: Gateway.")
    namespace: ObjectName | None = Field(default=None, description="Default: the service's own.")
    name: ObjectName = Field(description="Name of the Gateway.")
    section_name: ObjectName | None = Field(default=None, description="Name of one of its listeners. Default: all.")
    port: int | None = Field(default=None, ge=1, le=65_535, description="Only listeners of this port.")


class RouteSpec(ApiModel):
    """An HTTPRoute that leads all paths to the Service, and sets no end to a stream."""

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
