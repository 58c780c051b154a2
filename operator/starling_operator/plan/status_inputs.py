"""Everything that the status, its conditions and the events are written from."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from starling_crds.v1alpha1.status import CanaryStatus

from starling_operator.plan.canary import CanaryDecision
from starling_operator.plan.elastic.next_step import ElasticDecision
from starling_operator.plan.elastic.parallelism_scale import Desired
from starling_operator.plan.group import Group, Groups
from starling_operator.plan.observed import Service, Settings
from starling_operator.plan.readiness import ExpectedReports
from starling_operator.plan.recovery import RecoveryDecision
from starling_operator.plan.refusals import Refusal
from starling_operator.plan.rollout import RolloutStep
from starling_operator.plan.router import RouterState
from starling_operator.plan.scaling import Scale


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusInputs:
    """One service as it was observed, and what was decided about it. Mappings go by a group's name.

    service, settings, now   as observed; `now` in seconds since the epoch
    groups            all groups, those that are removed by this decision too
    target_revision   id of the revision whose groups the service is to have; "" where the spec is refused
    canary            what becomes of a canary; None without one
    taken_back        a canary that the spec has gone back from, while some of it is left
    scale             how many groups it is to have now, and why
    refusal           why the spec cannot be carried out; None if it can. Then `expected` is set
    expected          what agents of the target revision have to report
    unready           why a group is not ready; "" if it is. Has all groups
    broken            why a group does not come up by itself. Has only such groups
    rollout           groups to create and to remove
    recoveries        what is done about failed and drained groups. Has only such groups
    desired           wanted size of the groups; None if the service is not elastic
    elastic_steps     next step of each elastic group towards that size
    min_available     pods that evictions have to leave
    router            routers as observed; None if the spec has none, or cannot be read
    router_stays      seconds that routers stay which the spec no longer has; infinite: until a group serves
    pool_stays        seconds that a pool stays which the spec no longer has; infinite: until the route leads elsewhere
    endpoint_closes   seconds until agents are closed to all but routers; infinite: never; 0: they are
    token_secret      name of the Secret from which pods mount the admin token
    """

    service: Service
    settings: Settings
    now: float
    groups: Groups
    target_revision: str
    canary: CanaryDecision | None = None
    taken_back: CanaryStatus | None = None
    scale: Scale
    refusal: Refusal | None = None
    expected: ExpectedReports | None = None
    unready: Mapping[str, str] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)
    rollout: RolloutStep = field(default_factory=RolloutStep)
    recoveries: Mapping[str, RecoveryDecision] = field(default_factory=dict)
    desired: Desired | None = None
    elastic_steps: Mapping[str, ElasticDecision] = field(default_factory=dict)
    min_available: int = 0
    router: RouterState | None = None
    router_stays: float = 0.0
    pool_stays: float = 0.0
    endpoint_closes: float = 0.0
    token_secret: str = ""

    @property
    def spec_revision(self) -> str:
        """Id of the revision that the spec asks for: that of a canary, while it is tried and when it was rolled back."""
        return self.canary.status.revision if self.canary is not None else self.target_revision

    @property
    def replicas(self) -> int:
        """Groups that the service is to have now."""
        return self.scale.groups

    @property
    def nodes(self) -> int:
        """Pods of one group of the target revision."""
        assert self.expected is not None
        return self.expected.layout.nodes

    def nodes_of(self, group: Group) -> int:
        """Pods that a group is to have now. An old group keeps its size: the spec's layout is that of the target revision."""
        step = self.elastic_steps.get(group.name)
        return step.nodes if step is not None else self.nodes if group.target else group.nodes

    @property
    def kept(self) -> tuple[Group, ...]:
        """Groups that exist and stay."""
        return tuple(group for group in self.groups.all if group not in self.rollout.remove)

    def is_ready(self, group: Group) -> bool:
        return not self.unready.get(group.name, "")

    @property
    def ready(self) -> tuple[Group, ...]:
        return tuple(group for group in self.kept if self.is_ready(group))

    @property
    def current(self) -> tuple[Group, ...]:
        """Kept groups of the target revision."""
        return tuple(group for group in self.kept if group.target)

    @property
    def old(self) -> tuple[Group, ...]:
        """Kept groups of other revisions, but for a canary's."""
        return tuple(group for group in self.kept if not group.target and not group.is_canary)
