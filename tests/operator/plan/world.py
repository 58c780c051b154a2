"""A tiny cluster that carries out decisions: no API server, no time but its own. Faults are single methods.

Its Kubernetes makes missing pods of StatefulSets, deletes pods with their owner, drains them, and schedules them on free nodes.
Its agents go through their phases, one a tick.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starling_agent.contract.report import Phase, Topology
from starling_agent.contract.router_report import CanaryReport, RouterReport, ServiceNotice
from starling_crds.spec_layout import group_layout
from starling_crds.v1alpha1.spec import InferenceServiceSpec
from starling_crds.v1alpha1.status import InferenceServiceStatus
from starling_operator.plan import labels
from starling_operator.plan.canary_notice import canary_notice
from starling_operator.plan.decision import Decision, Event
from starling_operator.plan.observed import Manifest, Observed, Pod, RouterPod, Service, Settings
from starling_operator.plan.plan import plan
from starling_operator.plan.pod_report import with_report

from tests.operator.plan.building import NOW, SETTINGS, TOKEN, make_report, make_spec, merged

PHASES: tuple[Phase, ...] = ("starting", "downloading", "loading", "warming", "serving")
DRAIN_TICKS = 2
LONG = 400.0
"""Longer than any back-off: what is waited for is no step, such as the end of a window."""
PAIRS: dict[str, Any] = {"parallelism": {"tensor": 4}, "accelerators": {"perNode": 2}}
OTHER = {"engine": {"blockSize": 32}}
BAD = "hf://org/bad"


@dataclass
class Member:
    """One pod. `stage` counts the phases it has gone through.

    broken    message of its agent once that gave up; `passing`: not for good
    peers     pods that it serves with
    drains    it is terminated on purpose
    """

    name: str
    uid: str
    group: str
    revision: str
    number: int
    owner: str
    config: str
    created_at: float
    scheduled: bool = False
    stage: int = -1
    deleted_at: float | None = None
    drain_left: int = 0
    drains: bool = False
    lost: bool = False
    shut_down: bool = False
    restarts: int = 0
    broken: str = ""
    passing: bool = False
    silent_since: float | None = None
    unready_since: float | None = None
    phase: str = "Pending"
    peers: frozenset[tuple[str, int]] = frozenset()
    asleep: bool = False


@dataclass
class World:
    """`node_slots`: pods that the cluster's nodes can hold. Faults do not go through the API, as in a real cluster."""

    changes: dict[str, Any] = field(default_factory=dict)
    settings: Settings = SETTINGS
    node_slots: int = 1000
    now: float = NOW
    generation: int = 1
    status: InferenceServiceStatus = field(default_factory=InferenceServiceStatus)
    children: dict[tuple[str, str], Manifest] = field(default_factory=dict)
    pods: list[Member] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    made: int = 0
    quota: str = ""
    """Reasons for which no pod is made; "" makes pods."""
    most_sets: int = 1000
    """StatefulSets that a quota allows: the API server refuses more."""
    refused: set[str] = field(default_factory=set)
    blind: bool = False
    """True while no agent has answered the operator, which has just started."""
    address: str = "10.0.0.1"
    """Address of each pod, once it is scheduled."""
    open: int = 0
    """Requests that wait in the first router until a group serves; then all are answered in the next tick."""
    answered: int = 0
    quiet_since: float = NOW
    told: ServiceNotice = field(default_factory=ServiceNotice)
    """What routers were told last."""
    fares: dict[str, Any] = field(default_factory=dict)
    """What the first router reports of a canary: fields of CanaryReport."""
    mute_routers: int = 0
    """Routers, of the last ones, that do not answer the operator."""
    cordoned: frozenset[str] | None = frozenset()
    """Cordoned nodes; each pod has a node for itself. None: the operator may not list nodes."""

    @property
    def spec(self) -> InferenceServiceSpec:
        return make_spec(self.changes)

    # the user

    def edit(self, changes: dict[str, Any]) -> None:
        after = merged(self.changes, changes)
        if after != self.changes:
            self.changes = after
            self.generation += 1

    def ask(self, requests: int = 1) -> None:
        """Sends requests. Without routers nobody holds them."""
        if ("Deployment", "chat-router") in self.children:
            self.open += requests

    # the operator

    def observe(self) -> Observed:
        service = Service(
            name="chat",
            namespace="prod",
            uid="service-uid",
            generation=self.generation,
            resource_version=str(self.made),
            spec=self.spec,
            status=self.status,
        )
        return Observed(
            service=service,
            children=self.children,
            pods=tuple(self._seen(member) for member in self.pods),
            routers=tuple(self._routers()),
            cordoned=self.cordoned,
            refused_children=frozenset(self.refused),
            pod_creation_errors={live["metadata"]["name"]: self.quota for live in self.sets() if self._lacks(live)}
            if self.quota
            else {},
            settings=self.settings,
            now=self.now,
            token=TOKEN,
        )

    def decide(self) -> Decision:
        return plan(self.observe(), _everything_is_possible)

    def reconcile(self, writes: int | None = None) -> Decision:
        """Reconciles once; with `writes`, the operator is killed after that many, and another one says what the status says."""
        decision = self.decide()
        self.told = decision.notice
        assert not (silent := silent_conditions(decision)), f"conditions without a message: {silent}"
        for done, write in enumerate(self._writes(decision)):
            if done == writes:
                self.told = ServiceNotice(canary=canary_notice(self.observe(), self.status.canary))
                return decision
            write()
        self.events += decision.events
        return decision

    def _writes(self, decision: Decision) -> Iterator[Callable[[], None]]:
        for manifest in (*decision.create, *decision.apply):
            yield partial(self._store, manifest)
        for deletion in decision.delete:
            yield partial(self._delete, deletion.kind, deletion.name, deletion.uid, deletion.grace_seconds)
        yield partial(setattr, self, "status", decision.status)

    # the cluster

    def tick(self, seconds: float = 1.0) -> None:
        """Every controller and agent does its next step."""
        self.now += seconds
        self._drain()
        self._start_routers()
        if self.open and self.available():
            self.answered, self.open, self.quiet_since = self.answered + self.open, 0, self.now
        for live in self.sets():
            self._make_pods(live)
        self._schedule()
        for member in self.pods:
            if member.scheduled and not member.lost and member.silent_since is None and not member.broken:
                self._advance(member)
        scaling = self.status.scaling
        for member in self.pods:
            member.asleep = member.stage == 4 and scaling is not None and scaling.sleep_level > 0
            member.unready_since = None if self._ready(member) else (member.unready_since or self.now)

    def settle(self, ticks: int = 400) -> int:
        """Ticks until nothing is left to do, and returns the ticks. Jumps in time where only time can help."""
        for count in range(ticks):
            before = self._picture()
            decision = self.reconcile()
            self.tick()
            if self._picture() == before and not self._busy():
                if decision.requeue_after is None or decision.requeue_after > LONG:
                    return count
                self.tick(decision.requeue_after)
        raise AssertionError(f"still not settled after {ticks} ticks: {self.status.conditions}")

    def sets(self) -> list[Manifest]:
        return [live for (kind, _), live in sorted(self.children.items()) if kind == "StatefulSet"]

    def members(self, group: str) -> list[Member]:
        return [member for member in self.pods if member.group == group and member.deleted_at is None]

    def available(self) -> list[str]:
        """Returns groups whose pods all serve, as clients see it."""
        return [
            live["metadata"]["name"]
            for live in self.sets()
            if self._serving(live["metadata"]["name"], int(live["spec"]["replicas"]))
        ]

    def condition(self, kind: str) -> tuple[str, str]:
        found = next(condition for condition in self.status.conditions if condition.type == kind)
        return found.status, found.reason

    def message(self, kind: str = "Ready") -> str:
        return next(condition.message for condition in self.status.conditions if condition.type == kind)

    def event_reasons(self, *reasons: str) -> list[str]:
        """Returns reasons of the events so far, or those among `reasons`."""
        return [event.reason for event in self.events if not reasons or event.reason in reasons]

    # faults

    def crash_container(self, member: Member) -> None:
        """The kubelet starts it again at once."""
        member.restarts += 1
        member.stage = 0
        member.silent_since = None

    def break_agent(self, member: Member, words: str = "rank 0 died: illegal instruction") -> None:
        member.broken = words

    def stumble(self, member: Member, words: str = "the download stalled: no byte for 60 s") -> None:
        """Fails the agent so that another process may succeed."""
        member.broken, member.passing = words, True

    def silence(self, member: Member) -> None:
        member.silent_since = self.now

    def lose_node(self, member: Member) -> None:
        member.lost = True
        member.deleted_at = member.deleted_at or self.now

    def evict(self, member: Member) -> None:
        """Deletes the pod without the budget."""
        self._end(member)
        member.drains = True

    def cordon(self, member: Member) -> None:
        if self.cordoned is not None:
            self.cordoned |= {host_of(member)}

    def ask_to_evict(self, member: Member) -> bool:
        """Evicts through the API if the budget allows it. Pods that are being deleted, or do not serve, may always be evicted."""
        if member.deleted_at is not None or not self._ready(member) or self.evictable() > 0:
            self.evict(member)
            return True
        return False

    def evictable(self) -> int:
        healthy = sum(self._ready(member) for member in self.pods)
        return healthy - int(self.children["PodDisruptionBudget", "chat"]["spec"]["minAvailable"])

    def shut_down(self, member: Member) -> None:
        """Shuts the node down: its kubelet ends the agent, and nobody deletes the pod."""
        member.shut_down = True

    def _end(self, member: Member) -> None:
        member.deleted_at = member.deleted_at or self.now
        member.drain_left = DRAIN_TICKS

    def fail_pod(self, member: Member) -> None:
        member.phase = "Failed"
        member.stage = -1

    # how it works

    def _store(self, manifest: Manifest) -> None:
        key = (manifest["kind"], manifest["metadata"]["name"])
        if key[0] == "StatefulSet" and key not in self.children and len(self.sets()) >= self.most_sets:
            self.refused.add(key[1])
            return
        self.refused.discard(key[1])
        old, generation = (known := self.children.get(key, {})).get("spec"), known.get("metadata", {}).get("generation", 0)
        if key not in self.children:
            self.made += 1
            uid = f"uid-{self.made}"
            self.children[key] = json.loads(json.dumps(manifest))
        else:
            uid, status = self.children[key]["metadata"]["uid"], self.children[key].get("status", {})
            self.children[key] = json.loads(json.dumps(manifest)) | ({"status": status} if status else {})
        self.children[key]["metadata"]["uid"] = uid
        if key[0] == "Deployment":
            self.children[key]["metadata"]["generation"] = generation + (self.children[key]["spec"] != old)

    def _delete(self, kind: str, name: str, uid: str, grace: int | None) -> None:
        if kind != "Pod":
            if self.children.get((kind, name), {}).get("metadata", {}).get("uid") == uid:
                del self.children[kind, name]
            return
        for member in [found for found in self.pods if found.name == name and found.uid == uid]:
            if grace == 0:
                self.pods.remove(member)
            else:
                self._end(member)
                member.drains |= grace is None

    def _start_routers(self) -> None:
        for (kind, _), live in self.children.items():
            if kind == "Deployment":
                count, generation = live["spec"]["replicas"], live["metadata"]["generation"]
                counts = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas"), count)
                live["status"] = {"observedGeneration": generation} | counts

    def _routers(self) -> Iterator[RouterPod]:
        live = self.children.get(("Deployment", "chat-router"), {})
        count = live.get("status", {}).get("readyReplicas", 0)
        for number in range(count):
            has = self.open if number == 0 else 0
            quiet = None if has else self.now - self.quiet_since
            canary = self._canary_report(self.fares if number == 0 else {})
            report = RouterReport(version=1, incarnation="i", open=has, held=has, quiet_seconds=quiet, canary=canary)
            said = report if number < count - self.mute_routers and not self.blind else None
            yield RouterPod(name=f"chat-router-{number}", uid=f"r-{number}", address="10.0.1.1", is_running=True, report=said)

    def _canary_report(self, fares: dict[str, Any]) -> CanaryReport | None:
        canary = self.told.canary
        return None if canary is None else CanaryReport(canary=canary.canary, attempt=canary.attempt, **fares)

    def _drain(self) -> None:
        owners = {live["metadata"]["uid"] for live in self.sets()}
        for member in list(self.pods):
            if member.owner not in owners and member.deleted_at is None:
                self._end(member)
            elif member.phase == "Failed" and not member.lost:
                self.pods.remove(member)
            elif member.deleted_at is not None and not member.lost:
                member.drain_left -= 1
                if member.drain_left <= 0:
                    self.pods.remove(member)

    def _make_pods(self, live: Manifest) -> None:
        group, spec = live["metadata"]["name"], live["spec"]
        taken = {member.name for member in self.pods}
        config = live["spec"]["template"]["spec"]["volumes"][0]["configMap"]["name"]
        for number in range(spec["replicas"]):
            name = f"{group}-{number}"
            if name not in taken and not self.quota:
                self.made += 1
                revision = live["metadata"]["labels"][labels.REVISION]
                member = Member(name, f"uid-{self.made}", group, revision, number, live["metadata"]["uid"], config, self.now)
                self.pods.append(member)
        for member in self.members(group):
            if member.number >= spec["replicas"]:
                self._end(member)

    def _lacks(self, live: Manifest) -> bool:
        return len(self.members(live["metadata"]["name"])) < live["spec"]["replicas"]

    def _schedule(self) -> None:
        free = self.node_slots - sum(member.scheduled for member in self.pods)
        for member in [waiting for waiting in self.pods if not waiting.scheduled and waiting.deleted_at is None]:
            if free > 0:
                member.scheduled, member.phase = True, "Running"
                free -= 1

    def _advance(self, member: Member) -> None:
        config = self.children.get(("ConfigMap", member.config))
        bad = config is not None and json.loads(config["data"]["agent.json"])["model"]["source"] == BAD
        if bad and member.stage >= 2:
            member.broken = "bad: config.json names no architecture"
        elif member.stage < 3:
            member.stage += 1
        elif member.stage == 3 and self._whole(member.group):
            member.stage, member.peers = 4, self._lives(member.group)

    def _whole(self, group: str) -> bool:
        """True if all nodes of a gang have loaded: then it serves."""
        live = self.children.get(("StatefulSet", group))
        members = self.members(group)
        return live is not None and len(members) == live["spec"]["replicas"] and all(member.stage >= 3 for member in members)

    def _lives(self, group: str) -> frozenset[tuple[str, int]]:
        return frozenset((member.uid, member.restarts) for member in self.members(group))

    def _serving(self, group: str, nodes: int) -> bool:
        members = self.members(group)
        return len(members) == nodes and all(self._ready(member) for member in members)

    def _ready(self, member: Member) -> bool:
        well = not member.asleep and not member.broken and not member.lost and member.silent_since is None
        going = member.deleted_at is not None or member.phase != "Running"
        # A gang that lost a member hangs until all of it is recreated.
        return well and not member.shut_down and member.stage == 4 and not going and member.peers == self._lives(member.group)

    def _seen(self, member: Member) -> Pod:
        answered = member.stage >= 0 and member.phase == "Running"
        pod = Pod(
            name=member.name,
            uid=member.uid,
            group=member.group,
            revision=member.revision,
            number=member.number,
            cluster_node=host_of(member) if member.scheduled else "",
            address=self.address if member.scheduled else "",
            phase=member.phase,
            scheduled=member.scheduled,
            ready=self._ready(member),
            unready_since=member.unready_since,
            created_at=member.created_at,
            deleted_at=member.deleted_at,
            drains=member.drains,
            lost=member.lost,
            restarts=member.restarts,
            waiting="" if member.scheduled else "Unschedulable: 0/2 nodes are available",
        )
        if not answered or self.blind:
            return pod
        age = 1.0 if member.silent_since is None else self.now - member.silent_since
        return with_report(pod, "chat", self._report(member), age)

    def _report(self, member: Member) -> Any:
        config = self.children.get(("ConfigMap", member.config))
        text = config["data"]["agent.json"] if config else ""
        layout = group_layout(self.spec.parallelism, self.spec.accelerators.per_node)
        loaded, serving = member.stage >= 3, member.stage == 4
        return make_report(
            config_hash=_hash(text),
            revision=member.revision,
            group=member.group,
            node=member.number,
            pod=member.name,
            phase="draining" if member.shut_down else "failed" if member.broken else PHASES[member.stage],
            ready=self._ready(member),
            asleep=member.asleep,
            healthy=not member.broken,
            fatal=bool(member.broken) and not member.passing,
            last_error=member.broken or None,
            weights=_hash(json.loads(text)["model"]["source"]) if text and loaded else None,
            token_seen=serving,
            service_token_seen=serving or None,
            topology=Topology(tensor=layout.tensor, pipeline=layout.pipeline, data=layout.data, expert=1, ranks=layout.ranks)
            if serving
            else None,
        )

    def _busy(self) -> bool:
        """Something still moves by itself: a pod drains or starts, or a restart waits for its time."""
        return any(
            member.deleted_at is not None or (member.scheduled and member.stage < 4 and not member.broken) for member in self.pods
        )

    def _picture(self) -> Any:
        pods = [(member.uid, member.stage, member.broken, member.deleted_at, member.asleep) for member in self.pods]
        return pods, sorted(self.children), self.status.model_dump()


def _everything_is_possible(spec: InferenceServiceSpec) -> Iterator[str]:  # noqa: ARG001 - it looks at nothing
    return iter(())


def silent_conditions(decision: Decision) -> list[str]:
    """Returns conditions without a message, of the service and of its children."""
    children = (condition for child in decision.child_statuses for condition in child["status"].get("conditions", ()))
    own = [condition.type for condition in decision.status.conditions if not condition.message]
    return own + [condition["type"] for condition in children if not condition["message"]]


def host_of(member: Member) -> str:
    return f"node-of-{member.name}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def settled(changes: dict[str, Any] | None = None) -> World:
    world = World(changes or {})
    world.settle()
    world.events.clear()
    return world


def names(world: World) -> list[str]:
    return [live["metadata"]["name"] for live in world.sets()]
