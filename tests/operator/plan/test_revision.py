"""Changes that make a new revision, and revisions that are used as stored."""

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from starling_operator.plan.observed import Settings
from starling_operator.plan.plan import plan
from starling_operator.plan.revision import Revision, Revisions, outdated, spec_hash, stored_revisions, target_revision

from tests.operator.plan.building import SETTINGS, make_service, make_spec, merged
from tests.operator.plan.world import World


@pytest.mark.parametrize(
    "changes",
    [
        {"replicas": 0},
        {"replicas": 5},
        {"suspend": True},
        {"className": "blue"},
        {"parallelism": {"data": 1}},
        {"parallelism": {"expert": 1}},
        {"rollout": {"maxSurge": 3, "maxUnavailable": 2}},
        {"recovery": {"restartBudget": 9}},
        {"recovery": {"windowSeconds": 120}},
        {"endpoint": {"port": 8080}},
        {"endpoint": {"route": {"parentRefs": [{"name": "edge"}]}}},
        # what is written out as it would be anyway
        {"engine": {"blockSize": 16}},
        {"engine": {}},
        {"model": {"dtype": "auto", "cache": {}}},
        {"parallelism": {"tensor": 1, "pipeline": 1}},
        {"accelerators": {"type": "cpu", "perNode": 1}},
        {"template": {}},
        {"drain": {"seconds": 120, "acceptSeconds": 5}},
        {"recovery": {"progressTimeoutSeconds": 20}},
        {"endpoint": {"port": 80, "allowedOrigins": []}},
        {"kvCache": {"tiers": {}, "dtype": "auto"}},
    ],
)
def test_needs_no_new_pods(changes: dict[str, Any]) -> None:
    assert spec_hash(make_spec(changes)) == spec_hash(make_spec())


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"source": "hf://org/name@main"}},
        {"model": {"source": "pvc://c/p"}},
        {"model": {"servedNames": ["chat"]}},
        {"model": {"dtype": "float32"}},
        {"model": {"maxLength": 512}},
        {"model": {"tokenSecret": {"name": "a", "key": "b"}}},
        {"model": {"pullSecrets": ["a"]}},
        {"model": {"cache": {"claim": "c"}}},
        {"model": {"cache": {"hostPath": "/c"}}},
        {"model": {"cache": {"sizeLimit": "1Gi"}}},
        {"image": "mine:1"},
        {"parallelism": {"tensor": 2}},
        {"parallelism": {"pipeline": 2}},
        {"parallelism": {"data": 4}},
        {"parallelism": {"expert": 4}},
        {"parallelism": {"tensor": 2}, "accelerators": {"perNode": 2}},
        {"accelerators": {"type": "nvidia.com/gpu"}},
        {"engine": {"kvMemory": "1Gi"}},
        {"engine": {"memoryFraction": 0.4}},
        {"engine": {"blockSize": 32}},
        {"engine": {"maxBatchedTokens": 4096}},
        {"engine": {"maxSequences": 16}},
        {"engine": {"maxWaiting": 16}},
        {"engine": {"prefixCaching": False}},
        {"engine": {"schedulingPolicy": "priority"}},
        {"engine": {"extraArgs": {"seed": 1}}},
        {"kvCache": {"tiers": {"cpu": {"bytes": "1Gi"}}}},
        {"kvCache": {"tiers": {"filesystem": {"bytes": "1Gi", "path": "/kv"}}}},
        {"kvCache": {"store": "mooncake://s:1"}},
        {"kvCache": {"dtype": "fp8"}},
        {"endpoint": {"apiKeySecret": {"name": "a", "key": "b"}}},
        {"endpoint": {"tlsSecret": "t"}},
        {"endpoint": {"allowedOrigins": ["*"]}},
        {"endpoint": {"limits": {"rate": "1/s"}}},
        {"template": {"spec": {"nodeSelector": {"a": "b"}}}},
        {"template": {"metadata": {"labels": {"a": "b"}}}},
        {"drain": {"seconds": 1}},
        {"drain": {"acceptSeconds": 1}},
        {"recovery": {"progressTimeoutSeconds": 40}},
    ],
)
def test_needs_new_pods(changes: dict[str, Any]) -> None:
    assert spec_hash(make_spec(changes)) != spec_hash(make_spec())


ELASTIC = {"data": 2, "elastic": {"min": 1, "max": 4}}


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        (ELASTIC, ELASTIC | {"data": 4}, True),
        ({"expert": 2, "elastic": {"min": 2, "max": 4}}, {"expert": 4, "elastic": {"min": 2, "max": 4}}, True),
        (ELASTIC, ELASTIC | {"elastic": {"min": 1, "max": 8}}, False),
        (ELASTIC, {"data": 2}, False),
        (ELASTIC, {"expert": 2, "elastic": {"min": 1, "max": 4}}, False),
        (ELASTIC, ELASTIC | {"pipeline": 2}, False),
        ({"data": 2}, {"data": 4}, False),
        ({"data": 2}, {"expert": 2}, False),
        ({}, {"data": 2}, False),
        ({}, {"data": 1}, True),
        ({"tensor": 2}, {"tensor": 2, "expert": 2}, True),
        ({"tensor": 2}, {"tensor": 2, "expert": 4}, False),
    ],
)
def test_a_size_needs_new_pods_unless_it_is_elastic(before: dict[str, Any], after: dict[str, Any], same: bool) -> None:
    old, new = make_spec({"parallelism": before}), make_spec({"parallelism": after})
    assert (spec_hash(old) == spec_hash(new)) == same
    assert (target({"parallelism": before}).id == target({"parallelism": after}).id) == same


def target(changes: dict[str, Any] | None = None, *, settings: Settings = SETTINGS, stored: tuple[Revision, ...] = ()) -> Revision:
    return target_revision(make_service(), make_spec(changes), settings, stored)


def test_a_revision_has_a_short_name_of_its_content() -> None:
    first = target()
    assert first == target()
    assert len(first.id) == 7
    assert first.id.isalnum()
    assert first.id == first.id.lower()
    assert first.number == 1
    assert target({"image": "mine:1"}).id != first.id
    assert target(settings=replace(SETTINGS, agent_image="other:2")).id != first.id


def test_a_revision_holds_all_that_its_groups_are_made_of() -> None:
    made = target({"parallelism": {"tensor": 4}, "accelerators": {"perNode": 2}})
    assert set(made.data) == {"format", "specHash", "image", "template", "config"}
    assert (made.data["format"], made.data["image"]) == (1, SETTINGS.agent_image)
    config = json.loads(made.data["config"])
    assert (config["revision"], config["service"]) == (made.id, "chat")
    assert made.config_hash == hashlib.sha256(made.data["config"].encode()).hexdigest()
    assert json.loads(json.dumps(made.data)) == made.data


@pytest.mark.parametrize(
    "settings",
    [
        replace(SETTINGS, agent_image="starling-agent:2"),
        replace(SETTINGS, image_pull_policy="Always"),
        replace(SETTINGS, cluster_domain="example.org"),
    ],
)
def test_another_operator_uses_what_is_stored(settings: Settings) -> None:
    stored = (target(),)
    assert target(settings=settings, stored=stored) is stored[0]


def test_another_spec_gets_the_next_number_and_the_new_image() -> None:
    stored = (replace(target(), number=7),)
    changed = target({"drain": {"seconds": 9}}, settings=replace(SETTINGS, agent_image="new:2"), stored=stored)
    assert (changed.number, changed.data["image"]) == (8, "new:2")


def test_going_back_finds_the_earlier_revision() -> None:
    first = target()
    second = target({"drain": {"seconds": 9}}, stored=(first,))
    assert target(stored=(first, second)) is first


def revisions(count: int) -> tuple[Revision, ...]:
    return tuple(Revision(f"r{number:06}", number, {}, uid=f"u{number}") for number in range(1, count + 1))


@pytest.mark.parametrize(
    ("count", "wanted", "in_use", "gone"),
    [
        (1, 1, set(), []),
        (4, 4, set(), []),
        (5, 5, set(), [1]),
        (7, 7, set(), [1, 2, 3]),
        (7, 7, {1, 2}, [3]),
        (7, 1, set(), [2, 3, 4]),
        (7, 1, {3, 4}, [2]),
        (5, 5, {1, 2, 3, 4}, []),
    ],
)
def test_three_unused_revisions_are_kept(count: int, wanted: int, in_use: set[int], gone: list[int]) -> None:
    stored = revisions(count)
    used = frozenset(stored[number - 1].id for number in in_use)
    assert [revision.number for revision in outdated(Revisions(stored, stored[wanted - 1]), used)] == gone


def test_old_revisions_go_with_their_configuration() -> None:
    world = World()
    for seconds in range(7):
        world.edit({"drain": {"seconds": seconds}})
        world.settle()
    kept = [name for kind, name in world.children if kind == "ControllerRevision"]
    assert len(kept) == 4
    assert sorted(kept) == sorted(name for kind, name in world.children if kind == "ConfigMap")


def test_an_upgrade_of_the_operator_rolls_nothing() -> None:
    world = World({"replicas": 2})
    world.settle()
    before = plan(world.observe())
    world.settings = replace(SETTINGS, agent_image="starling-agent:2")
    after = plan(world.observe())
    assert (after.create, after.delete, after.events) == ((), (), ())
    assert after.apply == before.apply
    assert after.status == before.status


def test_after_an_upgrade_the_next_edit_brings_the_new_image() -> None:
    world = World()
    world.settle()
    world.settings = replace(SETTINGS, agent_image="starling-agent:2")
    world.edit({"drain": {"seconds": 3}})
    world.settle()
    (live,) = world.sets()
    assert live["spec"]["template"]["spec"]["containers"][0]["image"] == "starling-agent:2"


def test_going_back_makes_the_very_same_pods_again() -> None:
    world = World()
    world.settle()
    (first,) = world.sets()
    world.edit({"drain": {"seconds": 3}})
    world.settle()
    world.settings = replace(SETTINGS, agent_image="starling-agent:2")
    world.edit({"drain": {"seconds": 120}})
    world.settle()
    (back,) = world.sets()
    assert back["spec"] == first["spec"]


def test_a_revision_of_an_unknown_format_is_not_touched() -> None:
    """Written by a newer operator that was taken back: its groups serve until the new ones do."""
    world = World({"drain": {"seconds": 3}})
    world.settle()
    (name,) = (name for kind, name in world.children if kind == "ControllerRevision")
    world.children["ControllerRevision", name]["data"] = {"format": 2}
    world.edit({"drain": {"seconds": 4}})
    old_set = world.sets()[0]["metadata"]["name"]
    assert stored_revisions(world.observe()) == ()
    decision = plan(world.observe())
    assert old_set not in {made["metadata"]["name"] for made in decision.apply}
    assert not decision.delete
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")
    assert ("ControllerRevision", name) in world.children


def test_a_deleted_configmap_is_made_again() -> None:
    world = World()
    world.settle()
    (name,) = (name for kind, name in world.children if kind == "ConfigMap")
    made = world.children.pop(("ConfigMap", name))
    (again,) = plan(world.observe()).create
    assert again == merged(made, {"metadata": {"uid": None}}) | {"metadata": again["metadata"]}


def test_what_live_sizes_change_is_in_no_revision() -> None:
    assert target({"replicas": 7, "parallelism": {"data": 1}}).data == target().data
