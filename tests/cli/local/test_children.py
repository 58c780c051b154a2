"""The store behaves as the API server does for what the plan needs."""

import json

import pytest
from starling_cli.local.children import LocalChildren


def manifest(name="a", kind="Service", **spec):
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "labels": {}}, "spec": spec}


@pytest.fixture
def store(tmp_path):
    return LocalChildren(tmp_path)


def version(store, name="a", kind="Service"):
    return store.objects[kind, name]["metadata"]["resourceVersion"]


def test_an_object_gets_a_uid_and_a_file(store, tmp_path):
    store.apply(manifest(port=1))
    stored = store.objects["Service", "a"]
    assert stored["metadata"]["uid"]
    assert json.loads((tmp_path / "Service" / "a.json").read_text()) == stored


def test_applying_the_same_changes_nothing(store):
    store.apply(manifest(port=1))
    before = version(store)
    store.apply(manifest(port=1))
    assert version(store) == before


def test_a_change_has_the_same_uid_and_a_new_version(store):
    store.apply(manifest(port=1))
    uid, before = store.objects["Service", "a"]["metadata"]["uid"], version(store)
    store.apply(manifest(port=2))
    assert store.objects["Service", "a"]["metadata"]["uid"] == uid
    assert version(store) != before


def test_what_exists_is_not_created_again(store):
    store.create(manifest(port=1))
    store.create(manifest(port=2))
    assert store.objects["Service", "a"]["spec"] == {"port": 1}


def test_deleting_needs_the_uid(store, tmp_path):
    store.apply(manifest())
    store.delete("Service", "a", "another")
    assert ("Service", "a") in store.objects
    store.delete("Service", "a", store.objects["Service", "a"]["metadata"]["uid"])
    assert not store.objects
    assert not (tmp_path / "Service" / "a.json").exists()


def test_deleting_what_is_not_there_is_fine(store):
    store.delete("Service", "a", "x")


def test_an_object_made_again_has_another_uid(store):
    store.apply(manifest())
    first = store.objects["Service", "a"]["metadata"]["uid"]
    store.delete("Service", "a", first)
    store.apply(manifest())
    assert store.objects["Service", "a"]["metadata"]["uid"] != first


def test_files_are_for_the_owner_alone(store, tmp_path):
    store.create(manifest("t", "Secret"))
    assert (tmp_path / "Secret" / "t.json").stat().st_mode & 0o077 == 0
