"""Reports of agents, by one long poll for each running pod, and what each poll notifies an agent of."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from starling_agent.client.agent_client import AgentClient, AgentRefusal
from starling_agent.client.bounded import BadAnswer
from starling_agent.contract.config import ADMIN_PORT
from starling_agent.contract.listening import authority
from starling_agent.contract.report import Report

from starling_operator.agents.polls import ANSWER_GRACE_SECONDS, Polls
from starling_operator.logs import Key
from starling_operator.plan.drain_deadlines import drain_deadlines
from starling_operator.plan.observed import Observed
from starling_operator.plan.pinned_commit import pinned_commit
from starling_operator.plan.pod_report import TOKEN_REFUSED
from starling_operator.plan.router import answers_routers_alone


@dataclass(frozen=True, slots=True)
class AgentTarget:
    """One agent, and what each poll notifies it of.

    commit    to load
    ends_at   when its pod has to have ended
    routed    it is to answer routers alone; None: as it does
    sleep     level at which its group is to sleep; 0: not at all. None: another agent of the group is told
    """

    address: str
    token: str
    commit: str | None
    ends_at: float | None
    routed: bool | None
    sleep: int | None


class AgentReports(Polls[AgentTarget, Report]):
    """Newest reports of agents."""

    def __init__(self, wake: Callable[[Key], None], client: AgentClient) -> None:
        super().__init__(wake)
        self._client = client

    def follow(self, key: Key, observed: Observed) -> None:
        """Polls the service's running pods and no others: the token is for pods of its own StatefulSets, until they end."""
        self._set_targets(key, self._targets(key, observed), {pod.uid for pod in observed.pods})

    def _targets(self, key: Key, observed: Observed) -> dict[str, AgentTarget]:
        """Returns whom to poll, by pod UID."""
        children, pods, ends = observed.children, observed.pods, drain_deadlines(observed)
        sets = {live["metadata"]["uid"] for (kind, _), live in children.items() if kind == "StatefulSet"}
        routed, polled, scaling = answers_routers_alone(observed), self._polls.get(key, {}), observed.service.status.scaling
        level = scaling.sleep_level if scaling is not None else 0
        return {
            pod.uid: AgentTarget(
                pod.address,
                observed.token,
                pinned_commit(key[1], pod.revision, children),
                ends.get(pod.uid),
                routed,
                level if pod.number == 0 else None,
            )
            for pod in pods
            if pod.phase == "Running" and pod.address and (pod.owner in sets or pod.uid in polled)
        }

    async def _ask(self, target: AgentTarget, known: Report | None, wait: float) -> Report:
        try:
            return await self._client.report(
                authority(target.address, ADMIN_PORT),
                target.token,
                known=known,
                wait=wait,
                commit=target.commit,
                ends_in=None if target.ends_at is None else target.ends_at - time.time(),
                routed=target.routed,
                sleep=target.sleep,
                seconds=wait + ANSWER_GRACE_SECONDS,
            )
        except AgentRefusal as refusal:
            if refusal.status == 401:
                raise BadAnswer(TOKEN_REFUSED) from refusal
            raise

    def _is_news(self, before: Report | None, report: Report) -> bool:
        return before != report
