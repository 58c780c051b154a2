"""The tiny cluster with agents whose group changes size. Leaders speak `contract.scale`, one phase a tick."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from starling_agent.contract.config import LayoutConfig
from starling_agent.contract.report import GroupSize, Topology
from starling_agent.contract.scale import Operation
from starling_crds.manifest import SCALE_KIND
from starling_operator.plan.decision import Decision, ScaleCall
from starling_operator.plan.observed import LeaderRefusal, Manifest, Observed

from tests.operator.plan.world import Member, World

NEXT = {"waiting": "preparing", "preparing": "committing", "committing": "releasing", "releasing": "done"}


@dataclass
class Leader:
    """State of one life of a leader: operations by id, the newest last."""

    life: tuple[str, int]
    effective: int = 0
    epoch: int = 0
    operations: dict[str, Operation] = field(default_factory=dict)

    @property
    def newest(self) -> Operation | None:
        return next(reversed(self.operations.values()), None)

    def move(self, phase: str, **more: Any) -> None:
        newest = self.newest
        assert newest is not None
        self.operations[newest.id] = newest.model_copy(update={"phase": phase, **more})


@dataclass
class ElasticWorld(World):
    """`largest`: sizes above are refused; `failures`: so many operations fail; `deaf`: calls do not arrive; `streams` stay open."""

    leaders: dict[str, Leader] = field(default_factory=dict)
    answers: dict[str, LeaderRefusal] = field(default_factory=dict)
    calls: list[ScaleCall] = field(default_factory=list)
    largest: int = 1000
    failures: int = 0
    deaf: bool = False
    streams: int = 0
    layouts: dict[str, LayoutConfig] = field(default_factory=dict)

    # the user, an autoscaler

    def scale(self, units: int) -> None:
        self.children[SCALE_KIND, "chat"]["spec"]["replicas"] = units

    def scale_status(self) -> Manifest:
        found: Manifest = self.children[SCALE_KIND, "chat"]["status"]
        return found

    def sizes(self) -> list[int]:
        return [self.leaders[live["metadata"]["name"]].effective for live in self.sets()]

    # the operator

    def observe(self) -> Observed:
        return replace(super().observe(), answers=dict(self.answers))

    def _writes(self, decision: Decision) -> Iterator[Callable[[], None]]:
        *before, status = super()._writes(decision)
        yield from before
        for call in decision.scale_calls:
            yield partial(self._call, call)
        yield status
        for child in decision.child_statuses:
            yield partial(self._store_status, child)

    def _store(self, manifest: Manifest) -> None:
        status = self.children.get((manifest["kind"], manifest["metadata"]["name"]), {}).get("status")
        super()._store(manifest)
        if status is not None:
            self.children[manifest["kind"], manifest["metadata"]["name"]]["status"] = status

    def _store_status(self, child: Manifest) -> None:
        live = self.children.get((child["kind"], child["metadata"]["name"]))
        if live is not None and live["metadata"]["uid"] == child["metadata"]["uid"]:
            live["status"] = json.loads(json.dumps(child["status"]))

    # agents

    def tick(self, seconds: float = 1.0) -> None:
        super().tick(seconds)
        present = [live["metadata"]["name"] for live in self.sets()]
        for gone in self.leaders.keys() - set(present):
            del self.leaders[gone]
        for name in present:
            self._lead(name)

    def _call(self, call: ScaleCall) -> None:
        self.calls.append(call)
        leader = self.leaders.get(call.group)
        if self.deaf or leader is None:
            return
        refused = self._cancel(leader, call) if call.data is None else self._put(leader, call)
        if refused is None:
            self.answers.pop(call.operation, None)
        else:
            self.answers[call.operation] = refused

    def _put(self, leader: Leader, call: ScaleCall) -> LeaderRefusal | None:
        assert call.data is not None
        if call.operation in leader.operations:
            return None
        newest = leader.newest
        if newest is not None and not newest.ended:
            return LeaderRefusal("operation_running", f"{newest.id} runs")
        if call.data > self.largest:
            return LeaderRefusal("invalid_target", f"data: at most {self.largest} is possible, got {call.data}")
        if leader.effective and not self._is_well(call.group, leader):
            return LeaderRefusal("rank_dead", "a rank is dead")
        leader.operations[call.operation] = Operation(
            id=call.operation,
            source=leader.effective,
            target=call.data,
            phase="waiting",
            nodes=self._nodes(call.group, call.data),
        )
        return None

    def _cancel(self, leader: Leader, call: ScaleCall) -> LeaderRefusal | None:
        found = leader.operations.get(call.operation)
        if found is None:
            return LeaderRefusal("unknown_operation", "there is none")
        if found.phase in ("waiting", "preparing"):
            leader.move("cancelled")
        elif not found.ended:
            return LeaderRefusal("too_late", "it commits")
        return None

    def _lead(self, group: str) -> None:
        head = next((member for member in self.members(group) if member.number == 0 and member.stage >= 0), None)
        if head is None or head.lost:
            self.leaders.pop(group, None)
            return
        life, known = (head.uid, head.restarts), self.leaders.get(group)
        if known is None or known.life != life:
            self.leaders[group] = Leader(life)
            for member in self.members(group):
                member.stage = min(member.stage, 3)
            return
        newest = known.newest
        if newest is not None and not newest.ended:
            self._proceed(group, known, newest)
        self._start_epoch(group, known)

    def _proceed(self, group: str, leader: Leader, operation: Operation) -> None:
        if leader.effective and not self._is_well(group, leader) and operation.phase in ("waiting", "preparing"):
            leader.move("failed", error="a rank is dead")
        elif len(self._loaded(group, operation.target)) < self._nodes(group, operation.target):
            return
        elif operation.phase == "preparing" and self.failures:
            self.failures -= 1
            leader.move("failed", error="no memory for the experts")
        elif operation.phase == "committing":
            leader.effective, leader.epoch = operation.target, leader.epoch + 1
            leader.move("releasing", epoch=leader.epoch)
            for member in self.members(group):
                member.stage = min(member.stage, 3)
        else:
            leader.move(NEXT[operation.phase], seconds={**operation.seconds, operation.phase: 1.0})

    def _start_epoch(self, group: str, leader: Leader) -> None:
        """Ranks of the epoch serve, together or not at all; others wait."""
        loaded = self._loaded(group, leader.effective)
        if not leader.effective or len(loaded) < self._nodes(group, leader.effective):
            return
        if all(member.stage == 3 for member in loaded):
            lives = self._lives(group)
            for member in loaded:
                member.stage, member.peers = 4, lives

    def _is_well(self, group: str, leader: Leader) -> bool:
        gang = self._gang(group, leader.effective)
        return len(gang) == self._nodes(group, leader.effective) and all(self._ready(member) for member in gang)

    def _gang(self, group: str, data: int) -> list[Member]:
        return [member for member in self.members(group) if data and member.number < self._nodes(group, data)]

    def _loaded(self, group: str, data: int) -> list[Member]:
        well = [member for member in self._gang(group, data) if not member.broken and not member.lost and member.scheduled]
        return [member for member in well if member.stage >= 3 and member.silent_since is None]

    def _nodes(self, group: str, data: int) -> int:
        layout = self.layout(group)
        return max(1, data * layout.tensor * layout.pipeline // layout.per_node)

    def layout(self, group: str) -> LayoutConfig:
        """Layout of the group's revision, found by the group's name."""
        if group not in self.layouts:
            config = self.children["ConfigMap", group.rpartition("-")[0]]
            self.layouts[group] = LayoutConfig.model_validate(json.loads(config["data"]["agent.json"])["layout"])
        return self.layouts[group]

    def _whole(self, group: str) -> bool:  # noqa: ARG002 - its leader says when
        return False

    def _lives(self, group: str) -> frozenset[tuple[str, int]]:
        leader = self.leaders.get(group)
        return frozenset((member.uid, member.restarts) for member in self._gang(group, leader.effective if leader else 0))

    def available(self) -> list[str]:
        """Groups whose serving epoch serves."""
        names = [live["metadata"]["name"] for live in self.sets()]
        return [name for name in names if (found := self.leaders.get(name)) and found.effective and self._is_well(name, found)]

    def _report(self, member: Member) -> Any:
        report, leader = super()._report(member), self.leaders.get(member.group)
        effective = leader.effective if leader is not None else 0
        layout = self.layout(member.group)
        serving = member.stage == 4
        topology = Topology(
            tensor=layout.tensor,
            pipeline=layout.pipeline,
            data=effective,
            expert=effective * layout.tensor,
            ranks=effective * layout.tensor * layout.pipeline,
        )
        joined = sum(each.stage >= 3 for each in self.members(member.group)) * layout.per_node // layout.tensor // layout.pipeline
        own = {}
        if member.number == 0 and leader is not None:
            own = {
                "operation": leader.newest,
                "epoch": leader.epoch,
                "size": GroupSize(allocated=joined, joined=joined, effective=effective),
            }
        return report.model_copy(
            update={"topology": topology if serving else None, "open_streams": self.streams, "leader": member.number == 0, **own}
        )

    def _busy(self) -> bool:
        if any(member.deleted_at is not None for member in self.pods):
            return True
        if any(member.scheduled and member.stage < 3 and not member.broken for member in self.pods):
            return True
        return any(leader.newest is not None and not leader.newest.ended for leader in self.leaders.values())

    def _picture(self) -> Any:
        leaders = {name: (leader.life, leader.effective, leader.newest) for name, leader in self.leaders.items()}
        replicas = [(live["metadata"]["name"], live["spec"]["replicas"]) for live in self.sets()]
        return super()._picture(), leaders, replicas, json.dumps(self.children.get((SCALE_KIND, "chat")), sort_keys=True)


def elastic(size: int = 2, low: int = 1, high: int = 8, unit: str = "expert", **more: Any) -> dict[str, Any]:
    return {"parallelism": {unit: size, "elastic": {"min": low, "max": high}}, **more}
