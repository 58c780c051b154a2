"""Writes of the status to a real API server: one that begins an operation must not overwrite a version that was not seen."""

import json
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kubernetes.aio import config
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from starling_crds.v1alpha1.status import Condition, GroupNode, GroupStatus, InferenceServiceStatus
from starling_operator.apply.status import StatusThrottle, write_status
from starling_operator.cluster.kinds import INFERENCE_SERVICE
from starling_operator.cluster.kube import Kube
from starling_operator.plan.status import summarised
from starling_operator.watch.cache import Cache
from starling_operator.watch.observe import read_service

from tests.operator.shell.cluster import Cluster, manifest


@pytest.fixture
async def kube(apiserver: Path) -> AsyncIterator[Kube]:
    settings = Configuration()
    await config.load_kube_config(config_file=str(apiserver), client_configuration=settings)
    made = Kube(ApiClient(settings), lambda: 10.0)
    yield made
    await made.close()


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


LOADING = InferenceServiceStatus(
    conditions=[Condition(type="Ready", status="False", reason="Progressing", message="1/9")], groups=[group_of_paper(0, False)]
)
FURTHER = LOADING.model_copy(
    update={"conditions": [LOADING.conditions[0].model_copy(update={"message": "2/9"})], "groups": [group_of_paper(0, False)]}
)


def test_progress_is_written_once_a_second_and_what_is_new_at_once() -> None:
    throttle, key = StatusThrottle(), ("space", "chat")
    uids = {node.pod: node.uid for node in LOADING.groups[0].nodes}
    moved = [node.model_copy(update={"uid": uids[node.pod], "progress": "4/7.6 GB"}) for node in FURTHER.groups[0].nodes]
    further = FURTHER.model_copy(update={"groups": [FURTHER.groups[0].model_copy(update={"nodes": moved, "message": "x"})]})
    assert throttle.wait(key, LOADING, further) == 0, "the first"
    throttle.record(key)
    assert 0 < throttle.wait(key, LOADING, further) <= 1
    ready = [condition.model_copy(update={"status": "True"}) for condition in further.conditions]
    assert throttle.wait(key, LOADING, further.model_copy(update={"conditions": ready})) == 0
    assert throttle.wait(key, LOADING, further.model_copy(update={"ready_replicas": 1})) == 0
    assert throttle.wait(key, LOADING, FURTHER) == 0, "a pod was replaced"
