"""Deletions that the API server refuses are reported, tried again later, and keep nothing else from being done."""

from typing import Any, cast

from starling_crds.v1alpha1.status import InferenceServiceStatus
from starling_operator.apply.applier import Applier
from starling_operator.cluster.kinds import Kind
from starling_operator.cluster.kube import Kube, KubeError
from starling_operator.plan.decision import Decision, Delete
from starling_operator.watch.cache import Cache

from tests.operator.plan.building import make_service

KEPT, OTHER = Delete("StatefulSet", "chat-aaaaaaa-0", "u"), Delete("StatefulSet", "chat-aaaaaaa-1", "v")
REFUSED = "admission webhook denied the request"


class ApiServer:
    """Refuses to delete one object."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def delete(self, path: str, options: Any) -> Any:  # noqa: ARG002 - a webhook does not look at them
        self.asked.append(path.rpartition("/")[2])
        if path.endswith(KEPT.name):
            raise KubeError(403, "Forbidden", REFUSED)
        return {}


async def test_a_refused_deletion_is_reported_and_the_others_are_carried_out() -> None:
    server = ApiServer()
    applier = Applier(cast(Kube, server), Cache(), _has)
    decision = Decision(delete=(KEPT, OTHER), status=InferenceServiceStatus())
    outcome = await applier.carry_out(make_service(), decision)
    assert server.asked == [KEPT.name, OTHER.name]
    assert outcome.errors == [f"StatefulSet {KEPT.name}: cannot be deleted: {REFUSED}"]
    assert outcome.wrote and outcome.retry_after is not None and 0 < outcome.retry_after <= 1
    again = await applier.carry_out(make_service(), Decision(delete=(KEPT,), status=InferenceServiceStatus()))
    assert (server.asked, again.errors, again.wrote) == ([KEPT.name, OTHER.name], outcome.errors, False), "its pause is not over"
    assert applier.refused(("prod", "chat")) == frozenset(), "it is no child that cannot be made"
    unwanted = await applier.carry_out(make_service(), Decision(status=InferenceServiceStatus()))
    assert unwanted.errors == []


async def _has(kind: Kind) -> bool:  # noqa: ARG001 - the cluster has all
    return True
