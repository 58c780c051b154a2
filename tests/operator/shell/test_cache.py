"""The cache of objects that the watches show."""

from typing import Any

import pytest
from starling_operator.cluster.kinds import BY_NAME, GROUP, GROUP_LABEL, INFERENCE_SERVICE, POD, ROUTER_LABEL, SERVICE_LABEL
from starling_operator.watch.cache import Cache

SET = BY_NAME["StatefulSet"]
KEY = ("n", "chat")


def body(name: str, version: int, uid: str = "", owner: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": "n",
        "uid": uid or name,
        "resourceVersion": str(version),
        "managedFields": [{"manager": "kubectl", "operation": "Update"}],
    }
    owners = {"ownerReferences": [{**owner, "controller": True}]} if owner else {}
    return {
        "metadata": {**metadata, **owners, "labels": {SERVICE_LABEL: "chat"}, "creationTimestamp": "2026-01-01T00:00:00Z"},
        **more,
    }


def pod_body(name: str, owner: str, group: str | None = "g") -> dict[str, Any]:
    """Returns a pod of the StatefulSet "g", whose UID is `owner`."""
    made = body(name, 5, owner={"kind": "StatefulSet", "name": "g", "uid": owner}, spec={}, status={})
    made["metadata"]["labels"] |= {GROUP_LABEL: group} if group else {}
    return made


OWNER = {"kind": "InferenceService", "name": "chat", "uid": "s"}


def test_only_news_is_news() -> None:
    cache = Cache()
    assert cache.put(SET, body("a", 5, owner=OWNER)) == KEY
    assert cache.put(SET, body("a", 5, owner=OWNER)) is None
    assert cache.put(SET, body("a", 4, owner=OWNER)) is None
    assert cache.put(SET, body("a", 6, owner=OWNER)) == KEY
    held = cache.children("s")["StatefulSet", "a"]
    assert held["metadata"]["resourceVersion"] == "6" and held["metadata"]["managedFields"] == ""


def test_what_is_gone_stays_gone() -> None:
    cache = Cache()
    cache.put(SET, body("a", 5, owner=OWNER))
    assert cache.drop("a") == KEY
    assert cache.put(SET, body("a", 9, owner=OWNER)) is None
    assert cache.children("s") == {} and cache.drop("a") is None


def test_a_successor_of_the_same_name_is_not_dropped_with_its_predecessor() -> None:
    cache = Cache()
    cache.put(SET, body("a", 5, uid="old", owner=OWNER))
    cache.put(SET, body("a", 7, uid="new", owner=OWNER))
    cache.drop("old")
    assert cache.children("s")["StatefulSet", "a"]["metadata"]["uid"] == "new"
    cache.put(INFERENCE_SERVICE, body("chat", 1, uid="s1"))
    cache.put(INFERENCE_SERVICE, body("chat", 3, uid="s2"))
    cache.drop("s1")
    assert cache.service(KEY) is not None


def test_a_child_that_loses_its_owner_is_news_for_the_owner() -> None:
    cache = Cache()
    cache.put(SET, body("a", 5, owner=OWNER))
    assert cache.put(SET, body("a", 6)) == KEY
    assert cache.children("s") == {}


def test_others_objects_are_not_stored() -> None:
    cache = Cache()
    assert cache.put(SET, body("a", 5, owner={"kind": "Deployment", "name": "x", "uid": "d"})) is None
    assert cache.put(POD, body("p", 5, spec={}, status={})) is None
    cache.put(SET, body("g", 5, owner=OWNER))
    for name, group in (("q", "g"), ("r", "another"), ("s", None)):
        assert cache.put(POD, pod_body(name, "g", group)) == (KEY if group == "g" else None)
    assert [(pod.name, pod.owner) for pod in cache.pods(KEY)] == [("q", "g")]
    assert set(cache.seen(POD, "n")) == {"p", "q", "r", "s"} and cache.seen(POD, "m") == {}


REVISED = {f"{GROUP}/revision": "r", f"{GROUP}/role": "serving"}
GOING = {"deletionTimestamp": "2026-01-01T00:03:00Z"}


@pytest.mark.parametrize(
    ("labels", "more", "is_listed"),
    [
        # somebody's own set, named and labelled as a group is
        ({}, {}, False),
        (REVISED, {}, False),
        ({}, GOING, False),
        # what is left of a group whose set went before this operator came
        (REVISED, GOING, True),
    ],
)
def test_pods_of_an_unknown_set_are_listed_only_while_they_end(
    labels: dict[str, str], more: dict[str, str], is_listed: bool
) -> None:
    cache = Cache()
    made = pod_body("q", "foreign")
    made["metadata"] |= more
    made["metadata"]["labels"] |= labels
    cache.put(POD, made)
    assert bool(cache.pods(KEY)) is is_listed


def test_groups_of_all_services_that_wait_for_nodes_stand_in_one_queue() -> None:
    cache = Cache()
    for name in ("chat", "talk", "solo"):
        cache.put(SET, body(name, 5, owner=OWNER | {"name": name}))
        for number, spec in enumerate([{"nodeName": "n1"}, {}]):
            made = body(f"{name}-{number}", 5, owner={"kind": "StatefulSet", "name": name, "uid": name}, spec=spec, status={})
            made["metadata"]["labels"] = {SERVICE_LABEL: name, GROUP_LABEL: name}
            if name != "solo" or number == 0:
                cache.put(POD, made)
    assert [(gang.service, gang.group, gang.scheduled) for gang in cache.gangs()] == [
        (("n", "chat"), "chat", 1),
        (("n", "talk"), "talk", 1),
    ]
    placed = body("talk-1", 6, owner={"kind": "StatefulSet", "name": "talk", "uid": "talk"}, spec={"nodeName": "n2"}, status={})
    placed["metadata"]["labels"] = {SERVICE_LABEL: "talk", GROUP_LABEL: "talk"}
    cache.put(POD, placed)
    assert [gang.group for gang in cache.gangs()] == ["chat"]
    cache.drop("chat-1")
    assert cache.gangs() == ()


def test_pods_of_a_deleted_set_are_listed_until_they_are_gone_too() -> None:
    cache = Cache()
    cache.put(POD, pod_body("q", "g"))
    assert cache.pods(KEY) == ()
    cache.put(SET, body("g", 5, owner=OWNER))
    assert len(cache.pods(KEY)) == 1, "its set is seen after it"
    cache.drop("g")
    assert len(cache.pods(KEY)) == 1
    assert cache.drop("q") == KEY
    assert cache.pods(KEY) == ()


def test_routers_are_found_by_their_label_and_no_pods_of_groups() -> None:
    cache = Cache()
    router = body("chat-router-x", 5, uid="r", status={"phase": "Running", "podIP": "10.0.0.9"})
    router["metadata"]["labels"] = {ROUTER_LABEL: "chat"}
    assert cache.put(POD, router) == KEY
    (found,) = cache.routers(KEY)
    assert (found.name, found.address, found.is_running, found.is_going) == ("chat-router-x", "10.0.0.9", True, False)
    assert cache.pods(KEY) == ()
    assert cache.drop("r") == KEY and cache.routers(KEY) == ()
