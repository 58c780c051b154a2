"""Writes of the status to a real API server: one that begins an operation must not overwrite a version that was not seen."""

import json
import secrets
from dataclasses import replace
from typing import Any

import pytest
from starling_crds.v1alpha1.status import (
    CanaryStatus,
    Condition,
    GroupNode,
    GroupStatus,
    InferenceServiceStatus,
    RevisionStatus,
)
from starling_operator.apply.status import StatusThrottle, events_of, with_refusals, write_status
from starling_operator.cluster.kinds import INFERENCE_SERVICE
from starling_operator.cluster.kube import Kube
from starling_operator.plan.decision import Decision, Delete, Event
from starling_operator.plan.plan import plan
from starling_operator.plan.status import summarised
from starling_operator.watch.cache import Cache
from starling_operator.watch.observe import read_service

from tests.operator.plan.world import settled
from tests.operator.shell.cluster import Cluster, manifest


@pytest.mark.parametrize(("if_unchanged", "written"), [(True, False), (False, True)])
async def test_a_write_over_another_version(cluster: Cluster, kube: Kube, if_unchanged: bool, written: bool) -> None:
    cache = Cache()
    body = await cluster.apply(manifest())
    cache.put(INFERENCE_SERVICE, body)
    service = read_service(body)
    await cluster.edit("chat", {"replicas": 2})
    status = InferenceServiceStatus(replicas=7)
    assert await write_status(kube, cache, service, status, if_unchanged=if_unchanged) is written
    assert ((await cluster.service("chat"))["status"].get("replicas") == 7) is written
    fresh = read_service(await cluster.service("chat"))
    assert await write_status(kube, cache, fresh, status.model_copy(update={"replicas": 8}), if_unchanged=True)
    assert (await cluster.service("chat"))["status"]["replicas"] == 8


@pytest.mark.parametrize("ready", [True, False])
async def test_three_thousand_pods_fit_into_one_object(cluster: Cluster, kube: Kube, ready: bool) -> None:
    """etcd refuses 1.5 MB, and the object also holds the API server's managed fields."""
    cache = Cache()
    body = await cluster.apply(manifest())
    cache.put(INFERENCE_SERVICE, body)
    groups = summarised([group_of_paper(index, ready) for index in range(1000)])
    ready_condition = Condition(type="Ready", status="True" if ready else "False", reason="Serving", message="m")
    status = InferenceServiceStatus(replicas=1000, groups=groups, conditions=[ready_condition])
    assert await write_status(kube, cache, read_service(body), status, if_unchanged=False)
    written = await cluster.service("chat")
    assert len(written["status"]["groups"]) == 1000, "no group is left out"
    assert 100 < sum(len(group.get("nodes", ())) for group in written["status"]["groups"]) <= 128
    assert len(json.dumps(written, separators=(",", ":"))) < 256 * 1024
    assert read_service(written).status == status


def group_of_paper(index: int, ready: bool) -> GroupStatus:
    name = f"a-service-of-a-name-of-forty-letters-ok-aaaaaaa-{index}"
    nodes = [
        GroupNode(
            pod=f"{name}-{number}",
            number=number,
            host=f"ip-10-0-{number}-{index % 256}.eu-west-1.compute.internal",
            phase="downloading",
            progress="3.2/7.6 GB",
            uid=secrets.token_hex(16),
        )
        for number in range(3)
    ]
    message = "" if ready else f"{name}-0: downloading 3.2/7.6 GB, about 40 s left" * 4
    return GroupStatus(
        name=name,
        revision="aaaaaaa",
        index=index,
        ready=ready,
        served=ready,
        topology="TP1 PP1 DP3",
        nodes=nodes,
        message=message,
        progressed_at="" if ready else "2026-11-22T07:00:00Z",
    )


PODS = group_of_paper(0, False)
LOADING = InferenceServiceStatus(
    conditions=[Condition(type="Ready", status="False", reason="Progressing", message="1/9")], groups=[PODS]
)
OTHER_GROUP = group_of_paper(1, False)
EVENT, DELETE = Event("Normal", "Created", "m"), Delete("Pod", "p", "u", why="w")


def with_nodes(**fields: Any) -> dict[str, Any]:
    """Returns a status in which the first pod differs."""
    first, *others = PODS.nodes
    return {"groups": [PODS.model_copy(update={"nodes": [first.model_copy(update=fields), *others]})]}


@pytest.mark.parametrize(
    ("changes", "decided"),
    [
        (with_nodes(progress="4/7.6 GB", phase="loading", host="n"), {}),
        ({"groups": [PODS.model_copy(update={"ready": True, "served": True, "message": ""})], "ready_replicas": 1}, {}),
        ({"endpoints": ["10.0.0.1:8000"], "groups": [PODS, OTHER_GROUP], "replicas": 2}, {"events": (EVENT,)}),
        ({"groups": [PODS.model_copy(update={"ready": True, "nodes": []})]}, {}),
        ({"conditions": [LOADING.conditions[0].model_copy(update={"message": "2/9"})]}, {}),
    ],
)
def test_more_of_the_pods_is_written_once_a_second(changes: dict[str, Any], decided: dict[str, Any]) -> None:
    throttle, key = StatusThrottle(), ("space", "chat")
    new = LOADING.model_copy(update=changes)
    assert throttle.wait(key, LOADING, Decision(status=new, **decided), new) == 0, "the first"
    throttle.record(key)
    assert 0 < throttle.wait(key, LOADING, Decision(status=new, **decided), new) <= 1


@pytest.mark.parametrize(
    ("changes", "decided"),
    [
        ({"conditions": [LOADING.conditions[0].model_copy(update={"status": "True"})]}, {}),
        ({"conditions": [LOADING.conditions[0].model_copy(update={"observed_generation": 2})]}, {}),
        ({"canary": CanaryStatus(revision="new", stable="old")}, {}),
        ({"revision": RevisionStatus(current="new")}, {}),
        ({"groups": [PODS.model_copy(update={"restarts": 1, "restarted_at": ["2026-11-22T07:00:00Z"]})]}, {}),
        (with_nodes(uid="other"), {}),
        (with_nodes(restarts=1), {}),
        ({"groups": []}, {}),
        ({}, {"events": (EVENT, Event("Warning", "Restarted", "m"))}),
        ({}, {"delete": (DELETE,)}),
        ({}, {"begins_operation": True}),
    ],
)
def test_what_is_waited_for_or_remembered_is_written_at_once(changes: dict[str, Any], decided: dict[str, Any]) -> None:
    throttle, key = StatusThrottle(), ("space", "chat")
    throttle.record(key)
    new = LOADING.model_copy(update=changes)
    assert throttle.wait(key, LOADING, Decision(status=new, **decided), new) == 0


def test_a_refusal_has_one_event_and_hides_those_of_what_it_replaces() -> None:
    world = settled()
    observed, seen = world.observe(), []
    for _ in range(3):
        decision = plan(observed)
        seen += [event.reason for event in events_of(observed.service, decision, ["HTTPRoute chat: no"])]
        status = with_refusals(observed.service, decision.status, ["HTTPRoute chat: no"])
        observed = replace(observed, service=replace(observed.service, status=status))
    assert seen == ["ApplyFailed"]
    assert [event.reason for event in events_of(observed.service, plan(observed), [])] == ["Ready"]
