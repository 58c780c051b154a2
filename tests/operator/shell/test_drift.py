"""What others do to children is undone; what belongs to others is left alone."""

import pytest

from tests.operator.shell.cluster import CHILD_PATHS, SERVICES, Cluster, Manifest, manifest
from tests.operator.shell.conftest import StartOperator
from tests.operator.shell.proxy import Proxy
from tests.waiting import until

WHOLE = pytest.mark.whole

pytestmark = pytest.mark.usefixtures("kubelet")


async def test_an_edited_child_is_put_right(cluster: Cluster, start_operator: StartOperator) -> None:
    await start_operator()
    await cluster.apply(manifest())
    await cluster.ready("chat")
    path = f"{CHILD_PATHS['Service'].format(cluster.namespace)}/chat"
    before = await cluster.call("GET", path)
    edit = {"metadata": {"labels": {"serving.starling.dev/service": "other", "mine": "stays"}}, "spec": {"selector": {"role": "x"}}}
    await cluster.merge(path, edit)

    async def is_right() -> bool:
        found = await cluster.call("GET", path)
        return found["spec"]["selector"] == before["spec"]["selector"] and found["metadata"]["labels"] == {
            **before["metadata"]["labels"],
            "mine": "stays",
        }

    await until(is_right, "the Service to be as before", 60, lambda: cluster.call("GET", path))


async def test_a_selector_that_somebody_narrowed_is_put_right(cluster: Cluster, start_operator: StartOperator) -> None:
    await start_operator()
    await cluster.apply(manifest())
    await cluster.ready("chat")
    path = f"{CHILD_PATHS['Service'].format(cluster.namespace)}/chat"
    before = await cluster.call("GET", path)
    await cluster.merge(path, {"spec": {"selector": {"nobody": "has-this"}}})

    async def is_right() -> bool:
        return bool((await cluster.call("GET", path))["spec"]["selector"] == before["spec"]["selector"])

    await until(is_right, "the selector to be as before")


async def test_an_added_port_is_removed_and_an_added_label_stays(
    cluster: Cluster, start_operator: StartOperator, proxy: Proxy
) -> None:
    """Server-side apply leaves items that others added to a list with keys."""
    operator = await start_operator()
    await cluster.apply(manifest())
    await cluster.ready("chat")
    await operator.settled()
    path = f"{CHILD_PATHS['Service'].format(cluster.namespace)}/chat"
    before, writes = await cluster.call("GET", path), len(proxy.writes)
    ports = [{"name": "admin", "port": 9001, "targetPort": 8001}, *before["spec"]["ports"], {"name": "x", "port": 9999}]
    await cluster.merge(path, {"metadata": {"labels": {"mine": "stays"}}, "spec": {"ports": ports}})

    async def is_right() -> bool:
        found = await cluster.call("GET", path)
        return bool(found["spec"]["ports"] == before["spec"]["ports"])

    await until(is_right, "the ports to be as before", 60, lambda: cluster.call("GET", path))
    await operator.settled()
    found = await cluster.call("GET", path)
    assert found["metadata"]["labels"] == {**before["metadata"]["labels"], "mine": "stays"}
    assert len(proxy.writes) - writes == 2, "once is enough: it is applied, and what is left over is removed"
    # The removal owns nothing: a port that a later spec drops is removed too.
    await cluster.edit("chat", {"endpoint": {"port": 8123}})
    await cluster.ready("chat")
    assert [port["port"] for port in (await cluster.call("GET", path))["spec"]["ports"]] == [8123, 8000]


@pytest.mark.parametrize(
    "change",
    [
        [{"op": "add", "path": "/spec/ingress/1/from/0/namespaceSelector", "value": {}}],
        pytest.param([{"op": "add", "path": "/spec/ingress/1/from/-", "value": {"ipBlock": {"cidr": "0.0.0.0/0"}}}], marks=WHOLE),
        pytest.param([{"op": "add", "path": "/spec/ingress/-", "value": {}}], marks=WHOLE),
        pytest.param([{"op": "add", "path": "/spec/ingress/0/from", "value": [{"podSelector": {}}]}], marks=WHOLE),
        pytest.param([{"op": "add", "path": "/spec/ingress/0/ports/0/endPort", "value": 9000}], marks=WHOLE),
        pytest.param(
            [{"op": "add", "path": "/spec/podSelector/matchExpressions", "value": [{"key": "x", "operator": "Exists"}]}],
            marks=WHOLE,
        ),
        [{"op": "add", "path": "/spec/egress", "value": []}, {"op": "add", "path": "/spec/policyTypes/-", "value": "Egress"}],
        [{"op": "add", "path": "/spec/egress", "value": [{}]}],
    ],
    ids=lambda change: change[0]["path"],
)
async def test_a_network_policy_that_somebody_widened_or_narrowed_is_put_right(
    cluster: Cluster, start_operator: StartOperator, change: list[Manifest]
) -> None:
    operator = await start_operator()
    await cluster.apply(manifest())
    await cluster.ready("chat")
    path = f"{CHILD_PATHS['NetworkPolicy'].format(cluster.namespace)}/chat"
    before = await cluster.call("GET", path)
    changed = await cluster.call("PATCH", path, change, "application/json-patch+json")
    assert changed["spec"] != before["spec"]

    async def is_right() -> bool:
        return bool((await cluster.call("GET", path))["spec"] == before["spec"])

    await until(is_right, "the policy to be as before", 60, lambda: cluster.call("GET", path))
    await operator.settled()


async def test_a_deleted_child_comes_back(cluster: Cluster, start_operator: StartOperator) -> None:
    await start_operator(altered=("starling_operator.apply.applier:CREATE_AGAIN=0.5",))
    await cluster.apply(manifest())
    await cluster.ready("chat")
    before = await cluster.children()
    deleted = {(kind, name) for kind, name in before if kind not in ("ControllerRevision", "ConfigMap")}
    for kind, name in deleted:
        await cluster.delete(f"{CHILD_PATHS[kind].format(cluster.namespace)}/{name}")

    # A group is recreated under another number, while the old one drains.
    lasting = {key for key in deleted if "serving.starling.dev/group" not in before[key]["metadata"]["labels"]}

    async def is_back() -> bool:
        after = await cluster.children()
        return {key for key in lasting if key in after and _uid(after[key]) != _uid(before[key])} == lasting

    await until(is_back, "all children to be there again", 90, cluster.children_names)
    await cluster.ready("chat")


async def test_replicas_of_an_autoscaler_are_kept(cluster: Cluster, start_operator: StartOperator) -> None:
    await start_operator()
    await cluster.apply(manifest(replicas=1))
    await cluster.ready("chat")
    await cluster.merge(f"{SERVICES.format(cluster.namespace)}/chat/scale", {"spec": {"replicas": 3}})
    await cluster.ready("chat")
    body = await cluster.service("chat")
    assert (body["spec"]["replicas"], body["status"]["replicas"]) == (3, 3)


async def test_what_belongs_to_a_user_is_not_taken_over(cluster: Cluster, start_operator: StartOperator) -> None:
    users: Manifest = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "chat", "namespace": cluster.namespace},
        "spec": {"selector": {"app": "mine"}, "ports": [{"port": 80}]},
    }
    await cluster.apply(users, CHILD_PATHS["Service"])
    await start_operator()
    await cluster.apply(manifest())

    async def is_reported() -> bool:
        return "belongs to nobody" in (await cluster.condition("chat", "Stalled"))["message"]

    await until(is_reported, "the condition to say whose it is", 60, lambda: cluster.service("chat"))
    found = await cluster.call("GET", f"{CHILD_PATHS['Service'].format(cluster.namespace)}/chat")
    assert found["spec"]["selector"] == {"app": "mine"}
    assert "ownerReferences" not in found["metadata"] and "labels" not in found["metadata"]


async def test_an_edit_replaces_all_groups(cluster: Cluster, start_operator: StartOperator) -> None:
    await start_operator()
    await cluster.apply(manifest(replicas=2))
    await cluster.ready("chat")
    old = {name for kind, name in await cluster.children() if kind == "StatefulSet"}
    await cluster.edit("chat", {"engine": {"maxSequences": 8}})
    await cluster.ready("chat")

    async def is_replaced() -> bool:
        new = {name for kind, name in await cluster.children() if kind == "StatefulSet"}
        pods = {pod["metadata"]["name"].rpartition("-")[0] for pod in await cluster.pods()}
        return len(new) == 2 and not new & old and pods == new

    await until(is_replaced, "the old groups to be gone", 90)


def _uid(body: Manifest) -> str:
    return str(body["metadata"]["uid"])
