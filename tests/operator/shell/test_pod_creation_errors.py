"""Pods that Kubernetes refuses to make: the condition says so, in its words."""

from typing import Any

import pytest
from starling_operator.watch.pod_creation_errors import refusal_of

from tests.operator.shell.cluster import SERVICES, Cluster, manifest
from tests.operator.shell.conftest import StartOperator
from tests.operator.shell.process import OperatorProcess
from tests.operator.shell.proxy import Proxy
from tests.waiting import until

FORBIDDEN = 'pods "c-0" is forbidden: exceeded quota: few'


def event(reason: str, at: str, pod: str = "c-0", words: str = FORBIDDEN, **more: Any) -> dict[str, Any]:
    """Returns an event as the StatefulSet controller's, read in the newer API."""
    note = f"create Pod {pod} in StatefulSet c " + (f"failed error: {words}" if reason == "FailedCreate" else "successful")
    return {"reason": reason, "note": note, "deprecatedLastTimestamp": at, "metadata": {"creationTimestamp": at}, **more}


EARLY, LATE = "2026-01-01T00:00:00Z", "2026-01-01T00:00:09Z"


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([], ""),
        ([event("FailedCreate", EARLY)], FORBIDDEN),
        ([event("FailedCreate", EARLY), event("FailedCreate", LATE, words="over again")], "over again"),
        ([event("FailedCreate", LATE, words="over again"), event("FailedCreate", EARLY)], "over again"),
        ([event("FailedCreate", EARLY), event("SuccessfulCreate", LATE)], ""),
        ([event("SuccessfulCreate", EARLY), event("FailedCreate", LATE)], FORBIDDEN),
        ([event("SuccessfulCreate", LATE), event("FailedCreate", LATE)], FORBIDDEN),
        ([event("FailedCreate", EARLY, series={"lastObservedTime": LATE}), event("SuccessfulCreate", EARLY)], FORBIDDEN),
        ([event("FailedCreate", EARLY, pod="c-1")], FORBIDDEN),
        ([event("FailedCreate", EARLY, pod="c-10")], ""),
        (
            [event("FailedCreate", EARLY) | {"note": f"(combined from similar events): {event('FailedCreate', EARLY)['note']}"}],
            FORBIDDEN,
        ),
        ([event("RecreatingFailedPod", EARLY)], ""),
    ],
)
def test_the_last_event_about_a_missing_pod_counts(events: list[dict[str, Any]], words: str) -> None:
    assert refusal_of(events, ["c-0", "c-1"]) == words


async def test_a_quota_of_pods_is_reported_until_it_is_raised(
    cluster: Cluster, start_operator: StartOperator, proxy: Proxy, kubelet: object
) -> None:
    del kubelet  # it has to run
    path = await cluster.quota({"pods": "1"})
    operator = await start_operator()
    await cluster.apply(manifest(replicas=2))
    await _refused(cluster, "exceeded quota", "1 of 2 groups serve", "1 of 1 pods are not created")
    assert (await cluster.condition("chat", "Available"))["status"] == "True"
    await operator.settled()
    # Events are read at intervals, not at every reconcile, and the status is not written again for it.
    before, reads = (await cluster.service("chat"))["status"], len(_event_reads(proxy))
    await _reconcile_often(cluster, operator)
    assert (await cluster.service("chat"))["status"] == before
    assert len(_event_reads(proxy)) <= reads + 1
    await cluster.delete(path)
    await cluster.ready("chat")
    await operator.settled()
    reads = len(_event_reads(proxy))
    await _reconcile_often(cluster, operator)
    assert len(_event_reads(proxy)) == reads, "nothing is missing any more"


@pytest.mark.usefixtures("kubelet")
async def test_pod_security_is_reported(cluster: Cluster, start_operator: StartOperator) -> None:
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    await cluster.merge(f"/api/v1/namespaces/{cluster.namespace}", {"metadata": {"labels": label}})
    await start_operator()
    model = {"source": "hf://org/name", "cache": {"hostPath": "/var/cache/models"}}
    await cluster.apply(manifest(model=model))
    await _refused(cluster, "violates PodSecurity", "hostPath")


async def _reconcile_often(cluster: Cluster, operator: OperatorProcess) -> None:
    """Lets the operator reconcile the service four times more."""
    for count in range(4):
        runs = await operator.metric("starling_operator_reconcile_total")
        await cluster.merge(f"{SERVICES.format(cluster.namespace)}/chat", {"metadata": {"annotations": {"count": str(count)}}})
        await operator.more_runs(runs)


async def _refused(cluster: Cluster, *words: str) -> None:
    """Waits until the condition says all of it: it reports the quota before the other group serves."""

    async def is_reported() -> bool:
        found = await cluster.condition("chat", "Ready")
        return found["reason"] == "PodsRefused" and all(each in found["message"] for each in words)

    await until(is_reported, f"the condition to say {words}", 60, lambda: cluster.service("chat"))
    assert (await cluster.condition("chat", "Reconciling"))["status"] == "True"


def _event_reads(proxy: Proxy) -> list[str]:
    return [request.path for request in proxy.requests if request.method == "GET" and "/events?" in request.path]
