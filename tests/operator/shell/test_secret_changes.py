"""Pods learn that a Secret with API keys that they mount has changed, each once for each change."""

from typing import Any

import pytest
from starling_operator.apply import secret_changes
from starling_operator.apply.secret_changes import AGAIN, ANNOTATION, PERIOD, SecretChanges
from starling_operator.cluster.kinds import ROUTER_LABEL, SERVICE_LABEL
from starling_operator.cluster.kube import Kube, KubeError
from starling_operator.cluster.lease import LeaseLost

from tests.operator.shell.cluster import CHILD_PATHS, PODS, Cluster, Manifest

NAMES = ("keys", "others")
SECRETS = CHILD_PATHS["Secret"]
MANAGED = {"app.kubernetes.io/managed-by": "starling-operator"}
MOUNTED: dict[str, list[Manifest]] = {
    "agent": [{"name": "k", "secret": {"secretName": "keys"}}, {"name": "t", "emptyDir": {}}],
    "router": [{"name": "k", "projected": {"sources": [{"secret": {"name": "keys"}}, {"secret": {"name": "others"}}]}}],
    "none": [{"name": "k", "secret": {"secretName": "theirs"}}],
}


@pytest.fixture
async def pods(cluster: Cluster) -> None:
    for name in ("keys", "theirs"):
        await set_key(cluster, name, "a")
    for name, volumes in MOUNTED.items():
        labels = MANAGED | ({ROUTER_LABEL: "chat"} if name == "router" else {SERVICE_LABEL: "chat"})
        spec = {"containers": [{"name": "c", "image": "i"}], "volumes": volumes}
        await cluster.apply(pod(name, spec, labels), PODS)
    await cluster.apply(pod("theirs", {"containers": [{"name": "c", "image": "i"}]}, {}), PODS)


def pod(name: str, spec: Manifest, labels: dict[str, str]) -> Manifest:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


async def set_key(cluster: Cluster, name: str, key: str) -> str:
    """Returns the Secret's version."""
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": {"k": key}}
    return str((await cluster.apply(body, SECRETS))["metadata"]["resourceVersion"])


async def told(cluster: Cluster) -> dict[str, str]:
    """What each pod was told."""
    found = {one["metadata"]["name"]: one["metadata"].get("annotations", {}).get(ANNOTATION, "") for one in await cluster.pods()}
    return {name: text for name, text in found.items() if text}


def changes(cluster: Cluster, kube: Kube) -> SecretChanges:
    return SecretChanges(kube, NAMES, [cluster.namespace], lambda: {(cluster.namespace, "chat")})


@pytest.mark.usefixtures("pods")
async def test_pods_are_told_of_what_they_mount_alone(cluster: Cluster, kube: Kube) -> None:
    follower = changes(cluster, kube)
    assert await follower.refresh() == PERIOD
    first = await version(cluster, "keys")
    assert await told(cluster) == {"agent": f"keys={first}", "router": f"keys={first},others="}
    await set_key(cluster, "theirs", "b")
    second, other = await set_key(cluster, "keys", "b"), await set_key(cluster, "others", "a")
    await follower.refresh()
    assert await told(cluster) == {"agent": f"keys={second}", "router": f"keys={second},others={other}"}
    await cluster.delete(f"{SECRETS.format(cluster.namespace)}/keys")
    await follower.refresh()
    assert await told(cluster) == {"agent": "keys=", "router": f"keys=,others={other}"}


async def version(cluster: Cluster, name: str) -> str:
    return str((await cluster.call("GET", f"{SECRETS.format(cluster.namespace)}/{name}"))["metadata"]["resourceVersion"])


@pytest.mark.usefixtures("pods")
async def test_what_changed_while_no_operator_ran_is_told_and_nothing_twice(cluster: Cluster, kube: Kube) -> None:
    await changes(cluster, kube).refresh()
    second = await set_key(cluster, "keys", "b")
    follower = changes(cluster, kube)
    await follower.refresh()
    assert (await told(cluster))["agent"] == f"keys={second}"
    before = [one["metadata"]["resourceVersion"] for one in await cluster.pods()]
    await changes(cluster, kube).refresh()
    assert [one["metadata"]["resourceVersion"] for one in await cluster.pods()] == before


@pytest.mark.usefixtures("pods")
async def test_pods_of_another_operators_services_are_left_to_it(cluster: Cluster, kube: Kube) -> None:
    for label in (SERVICE_LABEL, ROUTER_LABEL):
        spec = {"containers": [{"name": "c", "image": "i"}], "volumes": MOUNTED["agent"]}
        await cluster.apply(pod(f"theirs-{label.rpartition('/')[2]}", spec, MANAGED | {label: "of-another-class"}), PODS)
    await changes(cluster, kube).refresh()
    assert (await told(cluster)).keys() == {"agent", "router"}


@pytest.mark.usefixtures("pods")
async def test_pods_are_told_once_more_as_their_kubelets_may_not_have_seen_the_secret(
    cluster: Cluster, kube: Kube, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secret_changes, "AGAIN_SECONDS", 0.0)
    follower = changes(cluster, kube)
    await follower.refresh()
    first = await told(cluster)
    await follower.refresh()
    assert await told(cluster) == {name: text + AGAIN for name, text in first.items()}
    before = [one["metadata"]["resourceVersion"] for one in await cluster.pods()]
    for another in (follower, changes(cluster, kube)):  # one that starts knows from the pods what they were told
        await another.refresh()
        await another.refresh()
    assert [one["metadata"]["resourceVersion"] for one in await cluster.pods()] == before
    second = await set_key(cluster, "keys", "b")
    await follower.refresh()
    assert (await told(cluster))["agent"] == f"keys={second}"


class Refusing:
    """The operator's client where writes to pods fail, as often as it is told."""

    def __init__(self, kube: Kube, *errors: Exception) -> None:
        self._kube, self._errors = kube, [*errors]

    async def annotate(self, *given: Any) -> None:
        if self._errors:
            raise self._errors.pop()
        await self._kube.annotate(*given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kube, name)


@pytest.mark.usefixtures("pods")
@pytest.mark.parametrize("refused", [False, True])
async def test_only_pods_that_may_not_be_told_wait_long(
    cluster: Cluster, kube: Kube, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Namespaces whose pods it may tell have their changes within PERIOD all the while."""
    monkeypatch.setattr(secret_changes, "REFUSED_PERIOD", 3600.0)
    error = KubeError(403, "Forbidden", "pods/status") if refused else KubeError(500, "InternalError", "a webhook")
    follower = changes(cluster, Refusing(kube, error))  # type: ignore[arg-type]  # it behaves as one
    for _ in range(2):
        assert await follower.refresh() == PERIOD
    assert (len(await told(cluster)) < 2) is refused


@pytest.mark.usefixtures("pods")
@pytest.mark.parametrize(
    "error",
    [
        KubeError(500, "InternalError", "a webhook does not answer"),
        KubeError(403, "Forbidden", "pods/status"),
        LeaseLost("another one has it"),
    ],
)
async def test_a_pod_that_was_not_told_is_told_the_next_time(
    cluster: Cluster, kube: Kube, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secret_changes, "REFUSED_PERIOD", 0.0)
    follower = changes(cluster, Refusing(kube, error))  # type: ignore[arg-type]  # it behaves as one
    assert await follower.refresh() == PERIOD
    assert len(await told(cluster)) < 2
    assert await follower.refresh() == PERIOD
    assert len(await told(cluster)) == 2
