"""Services as the plan sees them, for tests of what `starling up` makes of them."""

from starling_cli.planning.planned import plan_of
from starling_crds.v1alpha1.spec import InferenceServiceSpec
from starling_operator.plan.observed import Service


def service(**spec):
    source = {"source": "hf://org/name"}
    parsed = InferenceServiceSpec.model_validate({**spec, "model": source | spec.get("model", {})})
    return Service(name="chat", namespace="team", uid="u", generation=1, resource_version="1", spec=parsed)


def planned(**spec):
    return plan_of(service(**spec), "image")


def children(kind, **spec):
    return {child["metadata"]["name"]: child for child in planned(**spec).children if child["kind"] == kind}
