"""`InferenceService.status`, written by the operator alone."""

from typing import Literal

from pydantic import Field
from starling_crds.v1alpha1.base import ApiModel, map_by

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
        default_factory=list, description="Its pods. Of a service with more than 128 pods, only those of groups that do not serve."
    )
    progressed_at: str = Field(default="", description="When it last made progress while it was not ready, RFC 3339.")
    message: str = Field(default="", description="What it waits for, or its last error.")


class RevisionStatus(ApiModel):
    """Revisions of a rollout."""

    current: str = Field(default="", description="Revision that serves.")
    target: str = Field(default="", description="Revision of the spec.")


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
    # One writer needs no keys, by which the API server would keep a second copy of all fields' names.
    groups: list[GroupStatus] = Field(default_factory=list, description="Each group.")
    gang_released_at: str = Field(
        default="",
        description="When a partly scheduled group released its nodes for a group of another service, RFC 3339.",
    )
