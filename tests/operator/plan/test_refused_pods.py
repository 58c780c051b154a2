"""Pods that Kubernetes does not make, and pods that it evicts: the decision and its message."""

from dataclasses import replace
from typing import Any

import pytest
from starling_operator.plan.plan import plan

from tests.operator.plan.world import OTHER, PAIRS, names, settled

QUOTA = 'pods "chat" is forbidden: exceeded quota: few'


@pytest.mark.parametrize("shape", [{}, PAIRS])
def test_pods_that_kubernetes_refuses_are_shown_in_its_words(shape: dict[str, Any]) -> None:
    world = settled({"replicas": 1} | shape)
    world.quota = QUOTA
    world.edit({"replicas": 2})
    world.reconcile()
    world.tick()
    decision = world.reconcile()
    assert world.condition("Ready") == ("False", "PodsRefused")
    assert world.condition("Reconciling") == ("True", "PodsRefused")
    assert world.condition("Available") == ("True", "GroupsServe")
    count = 2 if shape else 1
    assert world.message() == f"1 of 2 groups serve; {names(world)[1]}: {count} of {count} pods are not created: {QUOTA}"
    assert decision.requeue_after is not None and decision.requeue_after < 10, "no watch tells when it is over"
    world.quota = ""
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")


def test_a_rollout_whose_pods_are_refused_keeps_the_old_groups() -> None:
    world = settled({"replicas": 2, "rollout": {"maxSurge": 1, "maxUnavailable": 0}})
    old, world.quota = names(world), QUOTA
    world.edit(OTHER)
    for _ in range(20):
        world.reconcile()
        world.tick()
    assert world.condition("Ready") == ("False", "PodsRefused")
    assert set(old) <= set(world.available())


def test_a_pod_that_a_taint_sends_away_is_looked_at_again_and_left_alone() -> None:
    world = settled()
    observed = world.observe()
    evicted = replace(observed.pods[0], evicted_by_taint=True, ready=False, deleted_at=world.now - 5)
    decision = plan(replace(observed, pods=(evicted,)))
    assert decision.delete == ()
    assert decision.requeue_after is not None and decision.requeue_after < 10
    lost = plan(replace(observed, pods=(replace(evicted, lost=True),)))
    assert [(deletion.kind, deletion.grace_seconds) for deletion in lost.delete] == [("Pod", 0)]
