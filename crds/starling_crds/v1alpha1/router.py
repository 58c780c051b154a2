"""`spec.router`: routers in front of all groups, and the tenants that they serve."""

from typing import Annotated, Literal

from pydantic import Field
from starling_crds.rules import Rule
from starling_crds.v1alpha1.base import ApiModel, map_by
from starling_crds.v1alpha1.strings import LABEL_KEYS, Amount, LabelValue, ObjectName, Size, TenantName

Weight = Annotated[
    float,
    # The API server compares a whole number with a minimum's whole part, which is 0.
    Rule(cel="self >= 0.001 && self <= 1000.0", holds=lambda value: 0.001 <= value <= 1000, message="must be 0.001 to 1000"),
]


class RouterPolicySpec(ApiModel):
    """Weights of the reasons to pick a backend; docs/routing.md has the formula. 0 leaves a reason out."""

    prefix: float = Field(default=2.0, ge=0, le=1000, description="Weight of tokens that are cached there.")
    load: float = Field(default=1.0, ge=0, le=1000, description="Weight of the work that is there.")
    session: float = Field(default=1.0, ge=0, le=1000, description="Weight of the backend that had the session last.")


class HoldSpec(ApiModel):
    """Requests that wait in each router while no backend takes them."""

    requests: int = Field(default=1000, ge=0, le=1_000_000, description="How many may wait; 0: none.")
    bytes: Size = Field(default="256Mi", description="Of their bodies together.")
    seconds: int = Field(default=60, ge=0, le=86_400, description="A request waits so long at most.")


class RouterResources(ApiModel):
    """Resources of one router."""

    requests: dict[str, Amount] | None = Field(default=None, max_length=16, description="Default: cpu 250m, memory 512Mi.")
    limits: dict[str, Amount] | None = Field(default=None, max_length=16, description="Default: none.")


class Toleration(ApiModel):
    """A taint of nodes that pods may run on all the same, as in a pod's spec."""

    RULES = (
        Rule(
            field="key",
            cel="(has(self.key) && self.key != '') || (has(self.operator) && self.operator == 'Exists')",
            holds=lambda toleration: bool(toleration.key) or toleration.operator == "Exists",
            message="must be set; without it operator must be Exists, and all taints are tolerated",
        ),
        Rule(
            field="value",
            cel="!has(self.value) || self.value == '' || !has(self.operator) || self.operator != 'Exists'",
            holds=lambda toleration: not toleration.value or toleration.operator != "Exists",
            message="is not possible with operator Exists, which takes any value",
        ),
        Rule(
            field="tolerationSeconds",
            cel="!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            holds=lambda toleration: toleration.toleration_seconds is None or toleration.effect == "NoExecute",
            message="needs effect NoExecute: other taints end no pod",
        ),
    )

    key: str | None = Field(default=None, max_length=317, description="Key of the taint.")
    operator: Literal["Exists", "Equal"] | None = Field(default=None, description="Exists takes any value. Default: Equal.")
    value: LabelValue | None = Field(default=None, description="Value of the taint.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="Effect of the taint. Default: any."
    )
    toleration_seconds: int | None = Field(default=None, description="A pod stays so long on a node with it. Default: for ever.")


class TenantSpec(ApiModel):
    """Shares a service with others: it has keys of its own, a part of the tokens and a quota."""

    name: TenantName = Field(description="Its name in metrics, and the key of router.tenantKeysSecret that has its API keys.")
    priority: int = Field(default=0, ge=-1000, le=1000, description="Of requests that wait, those of a higher priority go first.")
    weight: Weight = Field(default=1.0, description="Its part of the tokens, to those of others with the same priority.")
    tokens_per_minute: int | None = Field(
        default=None, ge=1, le=10**12, description="Tokens of prompts and outputs, at all routers together. Default: no limit."
    )
    concurrent: int | None = Field(
        default=None,
        ge=1,
        le=10**12,
        description="Requests at once, at all routers together, each of which gives one at least. Default: no limit.",
    )
    sees_all: bool = Field(
        default=False, description="Its keys show all servers and tenants at /ui; those of others show their own tenant."
    )


class RouterSpec(ApiModel):
    """Routers: each request goes where its prefix is cached and room is, and waits while no group serves."""

    RULES = (
        Rule(
            field="tenantKeysSecret",
            cel="has(self.tenantKeysSecret) == (has(self.tenants) && size(self.tenants) > 0)",
            holds=lambda router: (router.tenant_keys_secret is None) == (not router.tenants),
            message="must be set where there are tenants, and only there: it has a data key with API keys for each of them",
        ),
    )

    replicas: int = Field(default=2, ge=1, le=16, description="Routers, which share nothing.")
    policy: RouterPolicySpec = Field(default_factory=RouterPolicySpec, description="How a backend is picked.")
    hold: HoldSpec = Field(default_factory=HoldSpec, description="What waits while no backend takes it.")
    tenants: list[TenantSpec] = Field(
        default_factory=list,
        max_length=100,
        json_schema_extra=map_by("name"),
        description="Who share the service. A request must bring the API key of one of them. Default: nobody is told from others.",
    )
    tenant_keys_secret: ObjectName | None = Field(
        default=None, description="Name of a Secret with a data key for each tenant, named as it: its API keys, one a line."
    )
    resources: RouterResources = Field(default_factory=RouterResources, description="Resources of each router's container.")
    node_selector: Annotated[dict[str, LabelValue], Field(max_length=16), LABEL_KEYS] | None = Field(
        default=None, description="Labels of the nodes that routers may run on, such as kubernetes.io/arch. Default: all nodes."
    )
    tolerations: list[Toleration] = Field(
        default_factory=list, max_length=16, description="Taints of nodes that routers may run on all the same."
    )
    priority_class_name: ObjectName | None = Field(default=None, description="PriorityClass of routers. Default: the cluster's.")
