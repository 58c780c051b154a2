"""The process around `plan`: it collects what is observed and carries decisions out. kopf hands this one object to all handlers."""

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from typing import Any, Self

from starling_agent.client.agent_client import AgentClient

from starling_operator import metrics
from starling_operator.agents.first_answers import FirstAnswers
from starling_operator.agents.leaders import Leaders
from starling_operator.agents.polls import ANSWER_GRACE_SECONDS
from starling_operator.agents.reports import AgentReports
from starling_operator.agents.routers import RouterReports
from starling_operator.apply.applier import Applier
from starling_operator.apply.events import post_events
from starling_operator.apply.secret_changes import SecretChanges
from starling_operator.apply.status import StatusThrottle, events_of, with_refusals, write_child_status, write_status
from starling_operator.cluster.kinds import INFERENCE_SERVICE, WATCHED, Kind
from starling_operator.cluster.kube import Kube, connect
from starling_operator.cluster.lease import Lease, run_in_thread
from starling_operator.cluster.waiting import wait_for_key
from starling_operator.health import STUCK_SECONDS, OperatorHealth
from starling_operator.logs import Key
from starling_operator.pace import Pace
from starling_operator.plan.observed import Manifest, Observed
from starling_operator.plan.plan import plan
from starling_operator.reconciler import Reconciler
from starling_operator.settings import OperatorSettings
from starling_operator.watch.audit import Audit
from starling_operator.watch.cache import Cache
from starling_operator.watch.cordons import Cordons
from starling_operator.watch.nodes import Nodes
from starling_operator.watch.observe import class_of, observe
from starling_operator.watch.optional import OptionalKinds
from starling_operator.watch.pod_creation_errors import PodCreationErrors

DEBOUNCE_SECONDS = 0.05
"""Changes of children come in bursts, most of them echoes of our own writes. One reconcile handles a burst."""
LOOP_HANG_SECONDS = 20.0
"""Seconds without a heartbeat after which the main loop hangs, and another operator may take over."""
log = logging.getLogger(__name__)


class Operator:
    """Watches fill the cache, wake-ups lead to reconciles, and only the holder of the Lease reconciles."""

    def __init__(self, settings: OperatorSettings, kube: Kube, lease: Lease) -> None:
        self.settings, self._kube, self._lease = settings, kube, lease
        self.cache = Cache()
        self.reconciler, self._pace = Reconciler(self.reconcile, settings.parallel), Pace()
        self.stop = asyncio.Event()
        self.failure: BaseException | None = None
        self._agents = AgentClient(ANSWER_GRACE_SECONDS)
        self._reports, self._leaders = AgentReports(self._wake_for_news, self._agents), Leaders(lease.fence, self._agents)
        self._routers = RouterReports(self.reconciler.wake, self._agents)
        self._first_answers = FirstAnswers((self._reports, self._routers))
        self._nodes, self._pod_errors = Nodes(kube), PodCreationErrors(kube)
        self._cordons = Cordons(kube, self._wake_pods_on)
        self._optional = OptionalKinds(kube, self.cache, settings.scopes, self.reconciler.wake)
        self._applier = Applier(kube, self.cache, self._optional.has)
        self._secrets = SecretChanges(kube, settings.api_key_secrets, settings.scopes, self._own_services)
        self._audit = Audit(self.cache, WATCHED, settings.scopes, self.reconciler.wake)
        self._gauges, self._throttle = metrics.ConditionGauges(), StatusThrottle()
        self._health = OperatorHealth(self.unhealthy, self.unready)
        self._tasks: list[asyncio.Task[None]] = []
        self._is_leading, self._heartbeat_at = False, time.monotonic()
        self._waiting_for: str | None = None
        self._key = b""

    def __copy__(self) -> Self:
        """Returns itself: kopf copies what it hands to the handlers of each object."""
        return self

    async def start(self) -> None:
        """Returns when the API server answers and has the operator's key. The probes are answered before that."""
        await self._health.start(self.settings.http_host, self.settings.http_port)
        try:
            self._key = await wait_for_key(self._kube, self.settings.plan.operator_namespace, self._set_waiting_for)
        except asyncio.CancelledError:
            # kopf calls its cleanup handlers only after a start.
            await self.close()
            raise
        self._spawn(self._audit.run(self._kube), "audit")
        self._spawn(self._lead(), "leader")

    async def close(self) -> None:
        """Stops writing first, then releases the Lease."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._reports.close()
        await self._routers.close()
        await self._agents.close()
        await self._lease.release(self._kube)
        await self._health.close()
        await self._kube.close()
        # kopf waits for it: unset it would delay the end by five seconds after a signal.
        self.stop.set()

    def on_event(self, kind: Kind, event_type: str | None, body: Manifest) -> None:
        """Takes one event of one watch."""
        deleted = event_type == "DELETED"
        key = self.cache.drop(body["metadata"]["uid"]) if deleted else self.cache.put(kind, body)
        if key is not None:
            self.reconciler.wake(key, 0.0 if kind is INFERENCE_SERVICE else self._debounce(key))

    async def reconcile(self, key: Key) -> float | None:
        """Observes, plans, applies, writes the status and events. Returns the seconds until the next reconcile.

        Pods that were never polled wake the service with their answers: nothing is decided before.
        """
        self._pace.begin(key)
        with self._pace.part(key):
            observed = self._observe(key, reported=False)
        if observed is None:
            self._forget(key)
            return None
        with self._pace.part(key):
            self._reports.follow(key, observed)
            self._routers.follow(key, observed)
        if left := self._first_answers.seconds_left(key):
            return left
        await self._nodes.refresh(observed.pods)
        await self._pod_errors.refresh(key, observed)
        with self._pace.part(key):
            refreshed = self._observe(key)
        return 0.0 if refreshed is None else await self._carry_out(key, refreshed)

    def unhealthy(self) -> str | None:
        return self._audit.behind or (self.reconciler.stuck(STUCK_SECONDS) if self._is_leading else None)

    def unready(self) -> str | None:
        return (
            self._waiting_for or self.unhealthy() or (None if self._audit.synced.is_set() else "not everything has been seen yet")
        )

    def _observe(self, key: Key, *, reported: bool = True) -> Observed | None:
        """Returns the service's state; if not `reported`, without what agents and routers say: it shows whom to ask."""
        settings, answers = self._optional.adapt(self.settings.plan), self._leaders.answers(key)
        replies = (self._reports, self._routers) if reported else None
        observed = observe(self.cache, replies, settings, key, self._key, answers, self.settings.class_name)
        if observed is None:
            return None
        pods, errors = self._nodes.with_lost(observed.pods, observed.now), self._pod_errors.messages(key)
        children = self._applier.refused(key)
        return replace(
            observed,
            pods=pods,
            pod_creation_errors=errors,
            refused_children=children,
            cordoned=self._cordons.names,
            unlisted=self._optional.unlisted,
        )

    def _debounce(self, key: Key) -> float:
        return max(DEBOUNCE_SECONDS, self._pace.pause(key))

    def _wake_for_news(self, key: Key) -> None:
        """Wakes a service of which an agent has news. That of a small one waits for some milliseconds only."""
        self.reconciler.wake(key, self._pace.pause(key))

    def _wake_pods_on(self, nodes: Iterable[str]) -> None:
        """Wakes the services that have pods on these nodes."""
        named = set(nodes)
        for key in self.cache.all_services():
            if any(pod.cluster_node in named for pod in self.cache.pods(key)):
                self.reconciler.wake(key)

    def _own_services(self) -> Iterable[Key]:
        """Yields the services of this operator's class: the cache has those of all."""
        for key in self.cache.all_services():
            if class_of(self.cache.service(key) or {}) == self.settings.class_name:
                yield key

    def _set_waiting_for(self, problem: str | None) -> None:
        self._waiting_for = problem

    async def _carry_out(self, key: Key, observed: Observed) -> float | None:
        with self._pace.part(key):
            service, decision = observed.service, plan(observed)
        notify_after = self._routers.notify(key, observed, decision.notice)
        outcome = await self._applier.carry_out(service, decision)
        resend_after = await self._leaders.send(key, decision.scale_calls, observed.token)
        status = with_refusals(service, decision.status, outcome.errors)
        pause = 0.0 if outcome.errors else self._throttle.wait(key, service.status, decision, status)
        wrote_status = False
        if pause == 0.0:
            wrote_status = await write_status(self._kube, self.cache, service, status, if_unchanged=decision.begins_operation)
        if wrote_status:
            self._throttle.record(key)
        for child in decision.child_statuses:
            wrote_status |= await write_child_status(self._kube, self.cache, service, child)
        self._gauges.show(key, status)
        metrics.observe_operations(service.status, status)
        if pause == 0.0:  # they are of what the status did not have
            events = events_of(service, decision, outcome.errors)
            await post_events(self._kube, service, events, self.settings.identity)
        if outcome.wrote or wrote_status:
            # The cache has what was written; reconciles end when there is nothing left to write.
            return DEBOUNCE_SECONDS
        moments = (decision.requeue_after, outcome.retry_after, resend_after, notify_after, pause or None)
        return min((seconds for seconds in moments if seconds is not None), default=None)

    def _forget(self, key: Key) -> None:
        self._reports.forget(key)
        self._routers.forget(key)
        self._first_answers.forget(key)
        self._gauges.forget(key)
        self._applier.forget(key)
        self._leaders.forget(key)
        self._pod_errors.forget(key)
        self._throttle.forget(key)
        self._pace.forget(key)

    async def _lead(self) -> None:
        """Begins to reconcile once everything has been seen and the Lease is acquired."""
        await self._audit.synced.wait()
        await self._lease.acquire(self._kube)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send_heartbeats())
            group.create_task(run_in_thread(self._hold_lease))
            await self._cordons.refresh()
            await self._optional.refresh()
            self._is_leading = True
            metrics.LEADER.set(1)
            for key in self.cache.all_services():
                self.reconciler.wake(key)
            group.create_task(self.reconciler.run())
            group.create_task(self._optional.run())
            group.create_task(self._cordons.run())
            if self.settings.api_key_secrets:
                group.create_task(self._secrets.run())

    async def _send_heartbeats(self) -> None:
        """Shows the thread that holds the Lease that this loop goes on."""
        while True:
            self._heartbeat_at = time.monotonic()
            await asyncio.sleep(1.0)

    async def _hold_lease(self) -> None:
        """Runs in a thread of its own: a long decision, or a burst of events, must not lose the Lease."""
        kube = Kube(await connect(), self._lease.fence)
        try:
            await self._lease.hold(kube, lambda: time.monotonic() - self._heartbeat_at < LOOP_HANG_SECONDS)
        finally:
            await kube.close()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Ends the process with a task that ended, which none does by itself. The Deployment starts the process again."""
        if not task.cancelled():
            self.failure = _cause(task.exception()) or RuntimeError(f"{task.get_name()} ended")
            log.error("%s failed, the operator stops: %s", task.get_name(), self.failure)
            self.stop.set()


def _cause(failure: BaseException | None) -> BaseException | None:
    """Returns the failure that ended a group of tasks: the first of its group of failures."""
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure
