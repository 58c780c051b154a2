"""Pods that must start or stop."""

from pathlib import Path

import pytest
from starling_cli.local.pod import LocalPod
from starling_cli.local.stateful_sets import missing_pods, surplus_pods


def group(name="g", replicas=1, uid="u"):
    labels = {"serving.starling.dev/revision": "r"}
    return {name: {"metadata": {"name": name, "uid": uid, "labels": labels}, "spec": {"replicas": replicas}}}


def pod(name="g-0", uid="u"):
    return LocalPod(name=name, group="g", group_uid=uid, revision="r", number=0, folder=Path(), scratch=Path(), log=Path())


@pytest.mark.parametrize(
    ("groups", "pods", "missing", "surplus"),
    [
        ({}, [], [], []),
        (group(), [], ["g-0"], []),
        (group(replicas=3), [pod("g-1")], ["g-0", "g-2"], []),
        (group(), [pod()], [], []),
        ({}, [pod()], [], ["g-0"]),
        (group(replicas=1), [pod(), pod("g-1")], [], ["g-1"]),
        # Made again under the same name: the old pod goes first, and its successor waits for the name.
        (group(uid="v"), [pod(uid="u")], [], ["g-0"]),
        (group() | group("h", 2), [pod()], ["h-0", "h-1"], []),
    ],
)
def test_workload(groups, pods, missing, surplus):
    assert [found.name for found in missing_pods(groups, pods)] == missing
    assert [found.name for found in surplus_pods(groups, pods)] == surplus
