"""What the status is written from: what is seen, and what was decided about it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from starling_crds.v1alpha1.spec import InferenceServiceSpec

from starling_operator.plan.elastic.desired import Desired
from starling_operator.plan.elastic.step import ElasticStep
from starling_operator.plan.group import Group, Groups
from starling_operator.plan.observed import Pod, Service, Settings
from starling_operator.plan.proof import ExpectedReports
from starling_operator.plan.recovery import RecoveryDecision
from starling_operator.plan.refusals import Refusal
from starling_operator.plan.rollout import RolloutStep


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusInputs:
    """unready: why each group (by name) is not ready; "" for one that is. healing: of the groups that failed, by name.

    desired   size of the groups of an elastic service; steps: of its groups towards it, by name
    min_available   pods that evictions have to leave
    token_secret    name of the Secret that pods mount the token from
    """

    service: Service
    settings: Settings
    now: float
    groups: Groups
    target: str
    asked: ExpectedReports | None = None
    refused: Refusal | None = None
    change: RolloutStep = field(default_factory=RolloutStep)
    unready: Mapping[str, str] = field(default_factory=dict)
    healing: Mapping[str, RecoveryDecision] = field(default_factory=dict)
    desired: Desired | None = None
    steps: Mapping[str, ElasticStep] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    min_available: int = 0
    token_secret: str = ""

    @property
    def spec(self) -> InferenceServiceSpec | None:
        return self.service.spec

    @property
    def replicas(self) -> int:
        """Groups that the spec wants now."""
        return 0 if self.spec is None or self.spec.suspend else self.spec.replicas

    @property
    def nodes(self) -> int:
        """Pods of one group of the target revision."""
        assert self.asked is not None
        return self.asked.layout.nodes

    def nodes_of(self, group: Group) -> int:
        """Pods that a group is to have now. An old group keeps its size: the layout that the spec asks for is the new one's."""
        step = self.steps.get(group.name)
        return step.nodes if step is not None else self.nodes if group.target else group.nodes

    @property
    def kept(self) -> tuple[Group, ...]:
        """The groups that exist and stay."""
        return tuple(group for group in self.groups.all if group not in self.change.remove)

    @property
    def pods(self) -> tuple[Pod, ...]:
        """Of all groups, and of those that are gone and drain."""
        return tuple(pod for group in self.groups.all for pod in group.pods) + self.groups.leaving

    @property
    def effective(self) -> int:
        """Size that all groups of the target revision serve at, in data parallel ranks: the smallest; 0 while one has none."""
        return min((group.sizing.effective for group in self.current if group.sizing is not None), default=0)

    def is_ready(self, group: Group) -> bool:
        return not self.unready.get(group.name, "")

    @property
    def ready(self) -> tuple[Group, ...]:
        return tuple(group for group in self.kept if self.is_ready(group))

    @property
    def current(self) -> tuple[Group, ...]:
        return tuple(group for group in self.kept if group.target)

    @property
    def old(self) -> tuple[Group, ...]:
        return tuple(group for group in self.kept if not group.target)
