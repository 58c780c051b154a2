"""`InferenceService.status`, written by the operator alone."""

from typing import Literal

from pydantic import Field
from starling_crds.v1alpha1.base import ApiModel, map_by

CanaryPhase = Literal["trying", "passed", "rolledBack", "takenBack"]
ConditionStatus = Literal["True", "False", "Unknown"]
OperationPhase = Literal["waiting", "preparing", "committing", "releasing", "done", "failed", "cancelled", "refused"]


class Condition(ApiModel):
    """A condition, with the fields of metav1.Condition."""

    type: str = Field(description="Ready, Reconciling, Stalled, Available, Progressing or ModelLoaded.")
    status: ConditionStatus = Field(description="True, False or Unknown.")
    reason: str = Field(description="A word for machines.")
    message: str = Field(default="", description="A sentence for people: pod, container, cause, what to do.")
    observed_generation: int = Field(default=0, description="Generation that this was seen at.")
    last_transition_time: str = Field(default="", description="When `status` last changed, RFC 3339.")


class Size(ApiModel):
    """A size of one group, in both units: expert = data * tensor."""

    data: int = Field(description="Data parallel ranks (DP).")
    expert: int = Field(description="The ranks that experts are spread over if the model has any (EP).")


class PhaseSeconds(ApiModel):
    """Times of the phases by the clock of the group's leader; 0 for a phase that has not ended."""

    waiting: float = Field(default=0.0, description="Until the nodes that the target needs had joined.")
    preparing: float = Field(default=0.0, description="While the old epoch served.")
    committing: float = Field(default=0.0, description="The switch of all ranks.")
    releasing: float = Field(default=0.0, description="Until the ranks that left had released their resources.")


class OperationStatus(ApiModel):
    """A change of a live group's size. It is stored here before the group's leader is called."""

    id: str = Field(description="Id by which the leader knows it: sent twice, it is the same operation.")
    source: Size = Field(description="Size before; 0 when the group has none yet.")
    target: Size = Field(description="Size after.")
    phase: OperationPhase = Field(
        description="waiting (for pods), preparing, committing, releasing, done, failed, cancelled, or refused by the leader."
    )
    progress: int = Field(default=0, description="Of the phase, in percent.")
    attempt: int = Field(default=1, description="Tries of this target so far, this one included.")
    since: str = Field(default="", description="When the phase began, RFC 3339.")
    error: str = Field(default="", description="Why it failed, or what keeps the leader from beginning.")
    seconds: PhaseSeconds = Field(default_factory=PhaseSeconds, description="What each phase that has ended took.")


class GroupNode(ApiModel):
    """One pod of a group."""

    pod: str = Field(description="Name of the pod.")
    number: int = Field(description="Node number in the group.")
    host: str = Field(default="", description="Name of the Kubernetes node.")
    phase: str = Field(default="", description="The agent's phase, or the pod's while the agent does not answer.")
    progress: str = Field(default="", description="Of the phase, such as 3.2/7.6 GB.")
    uid: str = Field(default="", description="Of the pod, by which the operator notices that it was replaced.")
    restarts: int = Field(default=0, description="Of its containers, by which the operator notices the next one.")


class GroupStatus(ApiModel):
    """One group, as its agents report it."""

    name: str = Field(description="Name of the StatefulSet.")
    revision: str = Field(description="Revision of its template.")
    index: int = Field(description="Number of the group in its revision.")
    ready: bool = Field(default=False, description="All its agents serve; while it changes size, those of its present size.")
    served: bool = Field(default=False, description="It was ready once: from then on a failure restarts its pods.")
    topology: str = Field(default="", description="Effective layout as its leader reports it, such as TP2 PP1 DP4.")
    ranks: int = Field(default=0, description="Ranks in the serving epoch.")
    epoch: int = Field(default=0, description="Membership number.")
    desired: Size | None = Field(default=None, description="Size that an elastic group is to have.")
    allocated: Size | None = Field(default=None, description="Size that nodes have joined for.")
    joined: Size | None = Field(default=None, description="Size that workers have loaded for.")
    effective: Size | None = Field(default=None, description="Size of the serving epoch.")
    operation: OperationStatus | None = Field(default=None, description="The newest change of size.")
    restarts: int = Field(default=0, description="Restarts of its pods within spec.recovery.windowSeconds.")
    restarted_at: list[str] = Field(default_factory=list, description="When its pods were restarted, RFC 3339.")
    nodes: list[GroupNode] = Field(
        default_factory=list,
        description="Its pods. Of a service with more than 128 pods, only so many: of groups that do not serve, small ones first.",
    )
    progress: str = Field(default="", description="How far its pods are, by which the operator notices that it goes on.")
    progressed_at: str = Field(default="", description="When it last made progress while it was not ready, RFC 3339.")
    message: str = Field(default="", description="What it waits for, or its last error.")


class RevisionStatus(ApiModel):
    """Revisions of a rollout."""

    current: str = Field(default="", description="Revision that serves.")
    target: str = Field(default="", description="Revision of the spec.")


class CanaryStatus(ApiModel):
    """A new revision that is tried on a part of the requests."""

    revision: str = Field(description="The revision that is tried.")
    stable: str = Field(description="The one that serves meanwhile, with all its groups.")
    phase: CanaryPhase = Field(
        default="trying",
        description=(
            "trying; passed: it replaces the other one now; rolledBack: it is not tried again until the spec changes;"
            " takenBack: the spec went back to the other one, and its last pods drain."
        ),
    )
    step: int = Field(
        default=0, description="Step of spec.rollout.canary that it is at, or was at, from 1; 0: none of it served yet."
    )
    weight: int = Field(default=0, description="Percent of the requests that go to it.")
    since: str = Field(default="", description="When the step began, RFC 3339.")
    message: str = Field(default="", description="Why it was rolled back.")
    spec_hash: str = Field(
        default="", description="Of the spec.rollout.canary that it was rolled back with: another one is a new try."
    )


class RouterStatus(ApiModel):
    """Routers of spec.router."""

    replicas: int = Field(description="Routers that the spec asks for.")
    ready: int = Field(default=0, description="Those that serve, also while no group does.")


class ScalingStatus(ApiModel):
    """The number of groups that spec.scaling makes of spec.replicas."""

    wanted: int = Field(description="Groups that the service is to have now.")
    sleep_level: int = Field(default=0, description="Level at which all of them are to sleep; 0: they serve.")
    message: str = Field(default="", description="Why.")
    since: str = Field(default="", description="When the service last went to zero or to sleep, or was woken, RFC 3339.")
    started_at: str = Field(default="", description="When a group first served after that, RFC 3339.")
    start_seconds: int = Field(default=0, description="From then on until a group served, the last time; 0: not known.")


class InferenceServiceStatus(ApiModel):
    """State that the operator saw last."""

    observed_generation: int = Field(default=0, description="Generation that the operator acted on.")
    conditions: list[Condition] = Field(
        default_factory=list,
        json_schema_extra=map_by("type"),
        description="Ready, Reconciling, Stalled, Available, Progressing, ModelLoaded.",
    )
    replicas: int = Field(default=0, description="Groups that exist.")
    ready_replicas: int = Field(default=0, description="Groups that serve.")
    updated_replicas: int = Field(default=0, description="Groups that serve the target revision.")
    selector: str = Field(default="", description="Label selector of the leaders' pods, for autoscalers.")
    topology: str = Field(default="", description="Effective layout of the groups.")
    url: str = Field(default="", description="Base URL of the OpenAI API inside the cluster.")
    endpoints: list[str] = Field(default_factory=list, description="Addresses of the ready pods, at most 256 of them.")
    revision: RevisionStatus = Field(default_factory=RevisionStatus, description="Where a rollout stands.")
    canary: CanaryStatus | None = Field(default=None, description="The canary, until its revision serves alone or is given up.")
    router: RouterStatus | None = Field(default=None, description="Routers, if the spec asks for any.")
    scaling: ScalingStatus | None = Field(default=None, description="Number of groups, if spec.scaling.idleSeconds is set.")
    # One writer needs no keys, by which the API server would keep a second copy of all fields' names.
    groups: list[GroupStatus] = Field(default_factory=list, description="Each group.")
    gang_released_at: str = Field(
        default="",
        description="When a partly scheduled group released its nodes for a group of another service, RFC 3339.",
    )
