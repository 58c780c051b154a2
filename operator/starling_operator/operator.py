"""The shell around `plan`: what is seen goes in, what is decided comes out. kopf hands this one object to all handlers."""

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from typing import Any, Self

from starling_operator import metrics
from starling_operator.agents.leaders import Leaders
from starling_operator.agents.reports import AgentReports
from starling_operator.apart import run_apart
from starling_operator.apply.applier import Applier
from starling_operator.apply.events import post_events
from starling_operator.apply.status import StatusThrottle, refusal_events, with_refusals, write_child_status, write_status
from starling_operator.cluster.kinds import INFERENCE_SERVICE, WATCHED, Kind
from starling_operator.cluster.kube import Kube, connect
from starling_operator.cluster.lease import Lease
from starling_operator.cluster.waiting import wait_for_key
from starling_operator.health import STUCK_SECONDS, OperatorHealth
from starling_operator.logs import Key
from starling_operator.plan.observed import Manifest, Observed
from starling_operator.plan.plan import plan
from starling_operator.reconciler import Reconciler
from starling_operator.settings import OperatorSettings
from starling_operator.watch.audit import Audit
from starling_operator.watch.cache import Cache
from starling_operator.watch.cordons import Cordons
from starling_operator.watch.nodes import Nodes
from starling_operator.watch.observe import observe
from starling_operator.watch.optional import OptionalKinds
from starling_operator.watch.pod_creation_errors import PodCreationErrors

ECHO_SECONDS = 0.05
"""Changes of children come in bursts, most of them echoes of what was just written; they are looked at together."""
LOOP_SECONDS = 20.0
"""A loop that stands still for so long does nothing any more: another operator may take over."""
log = logging.getLogger(__name__)


class Operator:
    """Watches keep the cache; wake-ups lead to reconciles; only the holder of the Lease reconciles."""

    def __init__(self, settings: OperatorSettings, kube: Kube, lease: Lease) -> None:
        self.settings, self._kube, self._lease = settings, kube, lease
        self.cache = Cache()
        self.reconciler = Reconciler(self.reconcile, settings.parallel)
        self.stop = asyncio.Event()
        self.failure: BaseException | None = None
        self._reports, self._leaders = AgentReports(self.reconciler.wake), Leaders(lease.fence)
        self._nodes, self._absences = Nodes(kube), PodCreationErrors(kube)
        self._cordons = Cordons(kube, self._wake_on)
        self._optional = OptionalKinds(kube, self.cache, settings.scopes, self.reconciler.wake)
        self._applier = Applier(kube, self.cache, self._optional.has)
        self._audit = Audit(self.cache, WATCHED, settings.scopes, self.reconciler.wake)
        self._gauges, self._pace = metrics.ConditionGauges(), StatusThrottle()
        self._health = OperatorHealth(self.sick, self.unready)
        self._tasks: list[asyncio.Task[None]] = []
        self._leads, self._beaten = False, time.monotonic()
        self._waits_for: str | None = None
        self._key = b""

    def __copy__(self) -> Self:
        """kopf copies what it hands to the handlers of each object; there is only one shell."""
        return self

    async def start(self) -> None:
        """Returns when the API server answers and has the operator's key; the probes are answered from the beginning."""
        await self._health.start(self.settings.http_host, self.settings.http_port)
        try:
            self._key = await wait_for_key(self._kube, self.settings.plan.operator_namespace, self._wait_for)
        except asyncio.CancelledError:
            # kopf cleans up only after what was started.
            await self.close()
            raise
        self._spawn(self._audit.run(self._kube), "audit")
        self._spawn(self._lead(), "leader")

    async def close(self) -> None:
        """Stops writing first, then lets another operator begin."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._reports.close()
        await self._leaders.close()
        await self._lease.release(self._kube)
        await self._health.close()
        await self._kube.close()
        # kopf waits for it to the last, and five seconds in vain after a signal.
        self.stop.set()

    def seen(self, kind: Kind, event_type: str | None, body: Manifest) -> None:
        """One event of one watch."""
        deleted = event_type == "DELETED"
        key = self.cache.drop(body["metadata"]["uid"]) if deleted else self.cache.put(kind, body)
        if key is not None:
            self.reconciler.wake(key, 0.0 if kind is INFERENCE_SERVICE else ECHO_SECONDS)

    async def reconcile(self, key: Key) -> float | None:
        """Observe, plan, apply, status, events. Returns the seconds to the next look."""
        observed = self._observe(key)
        if observed is None:
            self._forget(key)
            return None
        self._reports.follow(key, observed)
        await self._reports.first_answers(key)
        await self._nodes.look(observed.pods)
        await self._absences.look(key, observed)
        heard = self._observe(key)
        return 0.0 if heard is None else await self._carry_out(key, heard)

    def sick(self) -> str | None:
        return self._audit.behind or (self.reconciler.stuck(STUCK_SECONDS) if self._leads else None)

    def unready(self) -> str | None:
        return self._waits_for or self.sick() or (None if self._audit.synced.is_set() else "not everything has been seen yet")

    def _observe(self, key: Key) -> Observed | None:
        settings, answers = self._optional.fit(self.settings.plan), self._leaders.answers(key)
        observed = observe(self.cache, self._reports, settings, key, self._key, answers, self.settings.class_name)
        if observed is None:
            return None
        pods, refused = self._nodes.judged(observed.pods, observed.now), self._absences.words(key)
        children = self._applier.refused(key)
        return replace(observed, pods=pods, refused_pods=refused, refused_children=children, cordoned=self._cordons.names)

    def _wake_on(self, nodes: Iterable[str]) -> None:
        """The services with pods on these nodes."""
        named = set(nodes)
        for key in self.cache.all_services():
            if any(pod.host in named for pod in self.cache.pods(key)):
                self.reconciler.wake(key)

    def _wait_for(self, what: str | None) -> None:
        self._waits_for = what

    async def _carry_out(self, key: Key, observed: Observed) -> float | None:
        service, decision = observed.service, plan(observed)
        outcome = await self._applier.carry_out(service, decision)
        tell_after = await self._leaders.tell(key, decision.scale, observed.token)
        status = with_refusals(service, decision.status, outcome.errors)
        urgent = bool(decision.begins or decision.events or outcome.errors)
        pause = 0.0 if urgent else self._pace.wait(key, service.status, status)
        wrote_status = False
        if pause == 0.0:
            wrote_status = await write_status(self._kube, self.cache, service, status, over_seen=decision.begins)
        if wrote_status:
            self._pace.wrote(key)
        for child in decision.statuses:
            wrote_status |= await write_child_status(self._kube, self.cache, service, child)
        self._gauges.show(key, status)
        metrics.show_operations(service.status, status)
        events = decision.events + refusal_events(service, outcome.errors)
        await post_events(self._kube, service, events, self.settings.identity)
        if outcome.wrote or wrote_status:
            # What was written is in the cache now; the next look sees it, and ends when there is nothing left to write.
            return ECHO_SECONDS
        moments = (decision.wake_after, outcome.retry_after, tell_after, pause or None)
        return min((seconds for seconds in moments if seconds is not None), default=None)

    def _forget(self, key: Key) -> None:
        self._reports.forget(key)
        self._gauges.forget(key)
        self._applier.forget(key)
        self._leaders.forget(key)
        self._absences.forget(key)
        self._pace.forget(key)

    async def _lead(self) -> None:
        """Nothing is decided before everything has been seen and the Lease is ours."""
        await self._audit.synced.wait()
        await self._lease.acquire(self._kube)
        await self._cordons.look()
        self._leads = True
        metrics.LEADER.set(1)
        for key in self.cache.all_services():
            self.reconciler.wake(key)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._beat())
            group.create_task(run_apart(self._keep_lease))
            group.create_task(self.reconciler.run())
            group.create_task(self._optional.run())
            group.create_task(self._cordons.run())

    async def _beat(self) -> None:
        """Shows the keeper of the Lease that this loop goes on."""
        while True:
            self._beaten = time.monotonic()
            await asyncio.sleep(1.0)

    async def _keep_lease(self) -> None:
        """In a thread of its own: a long decision, or a burst of events, is no reason to lose the Lease."""
        kube = Kube(await connect(), self._lease.fence)
        try:
            await self._lease.keep(kube, lambda: time.monotonic() - self._beaten < LOOP_SECONDS)
        finally:
            await kube.close()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """None of these tasks ends by itself: the process ends with it, and is started again by its Deployment."""
        if not task.cancelled():
            self.failure = _cause(task.exception()) or RuntimeError(f"{task.get_name()} ended")
            log.error("%s failed, the operator stops: %s", task.get_name(), self.failure)
            self.stop.set()


def _cause(failure: BaseException | None) -> BaseException | None:
    """A group of tasks reports a group of failures; the first one ended it."""
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure
