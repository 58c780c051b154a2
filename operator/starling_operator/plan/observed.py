"""What `plan` decides from. Built by `observe` from a cluster, by `starling up` from processes, by tests from thin air."""

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
    cluster_domain     of in-cluster DNS names
    operator_namespace, operator_labels   who may reach the admin endpoints
    service_monitors   whether this kind exists in the cluster
    fixed_user         whether pods name the user that they run as; a platform that chooses users itself refuses that
    gang_patience      seconds that a group may hold some of its nodes while another service's waits for nodes
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
    """The InferenceService. `spec` is None where it does not parse, and `spec_error` says why, with the field's path."""

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

    owner           UID of the StatefulSet that made it
    phase           Kubernetes' own: Pending, Running, Succeeded, Failed
    scheduled       has a node
    ready           the Ready condition
    unlabelled      somebody took away a label by which its Service or its revision knows it
    deleted_at      when its deletion was asked for; None: it stays
    due_at          when it has to have ended, its grace period included; None: it stays
    drains          it is taken away on purpose, with time to end its streams: evicted, preempted, deleted by a person, shut down
                    with its node
    lost            its node is gone: a pod on it will never end by itself
    evicted         a taint of its node sends it away: the node may be gone, or a live one that is being emptied
    unreported_since   when the node controller called it unready, for its kubelet had fallen silent; None: it did not
    tolerates       seconds that it stays on a node that is not ready
    restarts        of its containers
    waiting         why a container waits or why it ended, with its message: "ImagePullBackOff: ...", "OOMKilled", or why the
                    pod has no node: "Unschedulable: ..."
    last_log        the agent's last words, from the termination message
    refuses_token   its agent asks for another token than the operator's; there is no report then
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
    """Seconds since the agent last answered; None: it never did."""
    report_error: str = ""
    """Why its last answer is not believed; there is no report then."""
    refuses_token: bool = False


@dataclass(frozen=True, slots=True)
class Gang:
    """A group of several pods, of any service, that waits for nodes. `held` pods have one; the newest was made at `since`."""

    service: tuple[str, str]
    group: str
    since: float
    held: int


@dataclass(frozen=True, slots=True)
class LeaderAnswer:
    """A leader's refusal, by its code (see the agent's contract) and in its words."""

    code: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Everything at one instant.

    children    the live objects that the service owns, pods left out, by (kind, name)
    pods        of all groups, those being deleted too
    answers     by operation, the refusals of leaders that were told of it
    refused_pods   by group, why Kubernetes does not make its pods, in its own words
    refused_children   names of children that are wanted and that the API server refuses
    gangs       those of all services that wait for nodes
    cordoned    names of nodes that take no new pods, for they are about to be emptied; None: nobody may ask
    token       of the service's admin endpoints
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
