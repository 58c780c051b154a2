"""Input of `plan`. `watch.observe` builds it from a cluster, `starling up` from processes on one machine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starling_agent.contract.report import Report
from starling_crds.v1alpha1.spec import InferenceServiceSpec
from starling_crds.v1alpha1.status import InferenceServiceStatus

Manifest = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The operator's own settings.

    agent_image        image for new revisions of services that name none
    cluster_domain     last part of DNS names inside the cluster
    operator_namespace, operator_labels   pods that may reach the admin endpoints
    service_monitors   the cluster has ServiceMonitors
    fixed_user         pods name the user that they run as; a platform that chooses users itself refuses that
    gang_patience      seconds that a group may hold some of its nodes while a group of another service waits for nodes
    """

    agent_image: str
    image_pull_policy: str = "IfNotPresent"
    cluster_domain: str = "cluster.local"
    operator_namespace: str = "starling-system"
    operator_labels: Mapping[str, str] = field(default_factory=lambda: {"app.kubernetes.io/name": "starling-operator"})
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
    """One pod of a group. Times are seconds since the epoch.

    group, number   its group, and its index in it
    owner           UID of the StatefulSet that made it
    host            its cluster node
    phase           Kubernetes' own: Pending, Running, Succeeded, Failed
    scheduled       it has a node
    ready           the Ready condition
    unlabelled      it lost a label by which its Service or its revision selects it
    deleted_at      time of the request to delete it; None: it stays
    due_at          time at which it is killed, its grace period included; None: it stays
    drains          it is taken away on purpose, with time to end its streams: evicted, preempted, deleted by a person, shut down
                    with its node
    lost            its node is gone: a pod on it never ends by itself
    evicted         a NoExecute taint of its node evicts it: the node is gone, or a live one is being emptied
    unreported_since   time at which the node controller called it unready, since its kubelet fell silent; None: it did not
    tolerates       seconds that it stays on a node that is not ready
    restarts        restarts of its containers
    waiting         why a container waits or ended, with its message: "ImagePullBackOff: ...", "OOMKilled"; or why the pod has no
                    node: "Unschedulable: ..."
    last_log        the agent's last words, from the termination message
    report          the agent's last report; None if there is none that counts
    report_age      seconds since the agent last answered; None: it never did
    report_error    why its last answer does not count; there is no report then
    refuses_token   its agent wants another token than the operator's; there is no report then
    """

    name: str
    uid: str
    group: str
    revision: str
    number: int
    owner: str = ""
    host: str = ""
    address: str = ""
    phase: str = "Pending"
    scheduled: bool = False
    ready: bool = False
    unlabelled: bool = False
    created_at: float = 0.0
    deleted_at: float | None = None
    due_at: float | None = None
    drains: bool = False
    lost: bool = False
    evicted: bool = False
    unreported_since: float | None = None
    tolerates: float = 0.0
    restarts: int = 0
    waiting: str = ""
    last_log: str = ""
    report: Report | None = None
    report_age: float | None = None
    report_error: str = ""
    refuses_token: bool = False


@dataclass(frozen=True, slots=True)
class Gang:
    """A group of several pods, of any service, that waits for nodes: `held` pods have one, the newest was made at `since`."""

    service: tuple[str, str]
    group: str
    since: float
    held: int


@dataclass(frozen=True, slots=True)
class LeaderAnswer:
    """A leader's refusal: its code (see `starling_agent.contract.scale`) and its message."""

    code: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Observed:
    """State of one service at one instant.

    children           live objects that the service owns, without pods, by (kind, name)
    pods               pods of all groups, also those that are being deleted
    refused_pods       why Kubernetes does not make a group's pods, in its own words, by group
    refused_children   names of wanted children that the API server refuses
    cordoned           names of cordoned nodes: they are about to be emptied; None: the operator may not list nodes
    answers            refusals of leaders, by operation
    gangs              groups of all services that wait for nodes
    now                seconds since the epoch
    token              token of the service's admin endpoints
    """

    service: Service
    children: Mapping[tuple[str, str], Manifest] = field(default_factory=dict)
    pods: tuple[Pod, ...] = ()
    refused_pods: Mapping[str, str] = field(default_factory=dict)
    refused_children: frozenset[str] = frozenset()
    cordoned: frozenset[str] | None = None
    answers: Mapping[str, LeaderAnswer] = field(default_factory=dict)
    gangs: tuple[Gang, ...] = ()
    settings: Settings
    now: float
    token: str
