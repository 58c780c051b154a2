"""Input of `plan`. `watch.observe` builds it from a cluster, `starling up` from processes on one machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starling_agent.contract.report import Report
from starling_agent.contract.router_report import RouterReport
from starling_crds.v1alpha1.spec import InferenceServiceSpec
from starling_crds.v1alpha1.status import InferenceServiceStatus

Manifest = dict[str, Any]

_SCRAPERS = ["prometheus", "prometheus-agent", "vmagent", "alloy", "opentelemetry-collector"]
USUAL_SCRAPERS: tuple[Manifest, ...] = (
    {
        "namespaceSelector": {},
        "podSelector": {"matchExpressions": [{"key": "app.kubernetes.io/name", "operator": "In", "values": _SCRAPERS}]},
    },
)
"""Pods of any namespace with the names that operators and charts of scrapers give them."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The operator's own settings.

    agent_image        image for new revisions of services that name none
    router_image       image of routers, which need no torch; "": agent_image
    image_pull_policy, router_image_pull_policy   when nodes pull the one and the other; "" for routers: as for agents
    cluster_domain     last part of DNS names inside the cluster
    operator_namespace, operator_labels   select the operator's pods, the only ones that may reach the admin endpoints
    metrics_from       peers of NetworkPolicies that may read /metrics of agents behind routers
    service_monitors   the cluster has the ServiceMonitor CRD
    fixed_user         pods set runAsUser; False for a platform that assigns users itself and rejects that (OpenShift)
    gang_patience      seconds that a group that is only partly scheduled may keep its cluster nodes while another service's
                       group waits for some
    """

    agent_image: str
    router_image: str = ""
    image_pull_policy: str = "IfNotPresent"
    router_image_pull_policy: str = ""
    cluster_domain: str = "cluster.local"
    operator_namespace: str = "starling-system"
    operator_labels: Mapping[str, str] = field(default_factory=lambda: {"app.kubernetes.io/name": "starling-operator"})
    metrics_from: Sequence[Manifest] = USUAL_SCRAPERS
    service_monitors: bool = False
    fixed_user: bool = True
    gang_patience: float = 300.0


@dataclass(frozen=True, kw_only=True)
class Service:
    """The InferenceService. `spec` is None if it does not parse; `spec_error` then says why, with the field's path."""

    name: str
    namespace: str
    uid: str
    generation: int
    resource_version: str
    spec: InferenceServiceSpec | None
    spec_error: str | None = None
    status: InferenceServiceStatus = field(default_factory=InferenceServiceStatus)


@dataclass(frozen=True, kw_only=True)
class Pod:
    """One pod of a group. Times are Unix times, in seconds.

    group, number   its group, and its index in it
    owner           UID of the StatefulSet that created it
    cluster_node    name of its cluster node (nodeName)
    phase           Kubernetes' own: Pending, Running, Succeeded, Failed
    scheduled       it is bound to a cluster node
    ready           the Ready condition
    unready_since   since when that is False; None: it is True, or unknown
    unlabelled      it lost a label by which its Service or its revision selects it
    deleted_at      when its deletion was requested: deletionTimestamp minus the grace period; None: it is not being deleted
    grace_ends_at   when its grace period ends and it is killed: deletionTimestamp; None: it is not being deleted
    drains          it is being terminated on purpose, with time to end its streams: evicted, preempted, deleted by a person, or
                    its cluster node is shutting down
    lost            its cluster node is gone, so it never terminates by itself
    evicted_by_taint   a NoExecute taint evicts it: its cluster node is gone, or is alive and being drained
    unreported_since   when the node controller set Ready to False because its kubelet stopped reporting; None: it did not
    toleration_seconds   how long it stays on a cluster node that is not ready
    restarts        restarts of its containers
    waiting         reason and message of a container that waits or has ended: "ImagePullBackOff: ...", "OOMKilled"; or of a pod
                    that is not scheduled: "Unschedulable: ..."
    termination_message   the agent's last log lines, in status.containerStatuses
    report          the agent's last report; None if there is no valid one
    report_age      seconds since the agent last answered; None: it never did
    report_error    why its last answer is not valid; `report` is then None
    refuses_token   its agent rejected the operator's admin token; `report` is then None
    """

    name: str
    uid: str
    group: str
    revision: str
    number: int
    owner: str = ""
    cluster_node: str = ""
    address: str = ""
    phase: str = "Pending"
    scheduled: bool = False
    ready: bool = False
    unready_since: float | None = None
    unlabelled: bool = False
    created_at: float = 0.0
    deleted_at: float | None = None
    grace_ends_at: float | None = None
    drains: bool = False
    lost: bool = False
    evicted_by_taint: bool = False
    unreported_since: float | None = None
    toleration_seconds: float = 0.0
    restarts: int = 0
    waiting: str = ""
    termination_message: str = ""
    report: Report | None = None
    report_age: float | None = None
    report_error: str = ""
    refuses_token: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterPod:
    """One router.

    is_running   it has been started and has an address
    is_going     it is being deleted: requests that it has open may end
    report       its last report; None: it gave none
    report_age   seconds since it last answered
    """

    name: str
    uid: str
    address: str = ""
    is_running: bool = False
    is_going: bool = False
    report: RouterReport | None = None
    report_age: float = 0.0


@dataclass(frozen=True, slots=True)
class Gang:
    """A group, of any service, not all of whose pods are scheduled yet.

    since       creation time of its newest pod
    scheduled   how many of its pods are
    """

    service: tuple[str, str]
    group: str
    since: float
    scheduled: int


@dataclass(frozen=True, slots=True)
class LeaderRefusal:
    """A leader's refusal to resize: its code (see `starling_agent.contract.scale`) and its message."""

    code: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Observed:
    """State of one service at one instant.

    children           live objects that the service owns, except pods, by (kind, name)
    pods               pods of all groups, also those that are being deleted
    routers            pods of routers
    pod_creation_errors   Kubernetes' message why it does not create a group's pods, by group
    refused_children   names of wanted children that the API server refuses
    cordoned           names of cordoned cluster nodes, soon to be drained; None: the operator has no permission to list them
    unlisted           kinds, of those that a cluster may lack, whose objects `children` cannot have: none has been listed yet
    answers            refusals of leaders, by operation
    gangs              groups of all services that wait for nodes
    now                Unix time, in seconds
    token              token of the service's admin endpoints
    """

    service: Service
    children: Mapping[tuple[str, str], Manifest] = field(default_factory=dict)
    pods: tuple[Pod, ...] = ()
    routers: tuple[RouterPod, ...] = ()
    pod_creation_errors: Mapping[str, str] = field(default_factory=dict)
    refused_children: frozenset[str] = frozenset()
    cordoned: frozenset[str] | None = None
    unlisted: frozenset[str] = frozenset()
    answers: Mapping[str, LeaderRefusal] = field(default_factory=dict)
    gangs: tuple[Gang, ...] = ()
    settings: Settings
    now: float
    token: str

    def live(self, kind: str, name: str) -> Manifest | None:
        """Returns a child that is there to stay."""
        found = self.children.get((kind, name))
        return None if found is None or found["metadata"].get("deletionTimestamp") else found
