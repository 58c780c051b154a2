"""The CustomResourceDefinitions: generated from the types, so that the two cannot differ."""

from typing import Any

import yaml

from starling_crds.rules import VALIDATIONS, Rule
from starling_crds.schema import Schema, structural
from starling_crds.v1alpha1.scale import ParallelismScaleSpec, ParallelismScaleStatus
from starling_crds.v1alpha1.spec import InferenceServiceSpec
from starling_crds.v1alpha1.status import Condition, InferenceServiceStatus
from starling_crds.v1alpha1.strings import SERVICE_NAME

GROUP, VERSION, KIND, PLURAL = "serving.starling.dev", "v1alpha1", "InferenceService", "inferenceservices"
SCALE_KIND, SCALE_PLURAL = "ParallelismScale", "parallelismscales"

_NAME_RULE = Rule(
    cel=SERVICE_NAME.cel.replace("self", "self.metadata.name"),
    holds=lambda body: SERVICE_NAME.holds(body.metadata.name),
    message="metadata.name " + SERVICE_NAME.message.replace("{self}", "{metadata.name}"),
)


def inferenceservice_crd() -> dict[str, Any]:
    names = {"kind": KIND, "plural": PLURAL, "shortNames": ["infsvc"]}
    text = "A large language model that is served by an OpenAI endpoint inside the cluster."
    status = structural(InferenceServiceStatus, defaults=False) | {"default": _default_status()}
    schema = _resource(KIND, text, structural(InferenceServiceSpec), status)
    return _definition(names, {**schema, VALIDATIONS: [_NAME_RULE.validation()]}, _service_columns())


def parallelismscale_crd() -> dict[str, Any]:
    names = {"kind": SCALE_KIND, "plural": SCALE_PLURAL, "shortNames": ["pscale"]}
    text = "Size of an elastic InferenceService's groups, for autoscalers. Created by the operator, and named as the service."
    schema = _resource(SCALE_KIND, text, structural(ParallelismScaleSpec), structural(ParallelismScaleStatus, defaults=False))
    return _definition(names, schema, _scale_columns())


def crds() -> dict[str, dict[str, Any]]:
    """Returns the CRDs by the name of their file in crds/."""
    return {f"{crd['metadata']['name']}.yaml": crd for crd in (inferenceservice_crd(), parallelismscale_crd())}


def crd_yaml(crd: dict[str, Any]) -> str:
    """Returns YAML in block style, in the order of the types, so that people can read it."""
    return yaml.dump(crd, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Repeats a list that is used twice, without an anchor."""

    def ignore_aliases(self, data: Any) -> bool:
        del data
        return True


def _definition(names: dict[str, Any], schema: Schema, columns: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names['plural']}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": names["kind"],
                "listKind": f"{names['kind']}List",
                "plural": names["plural"],
                "singular": names["kind"].lower(),
                "shortNames": names["shortNames"],
                "categories": ["starling"],
            },
            "versions": [_version(schema, columns)],
        },
    }


def _version(schema: Schema, columns: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": columns,
    }


def _default_status() -> dict[str, Any]:
    """Returns the status until an operator writes one, as in the Gateway API: it says that no operator has seen the service."""
    waiting = Condition(
        type="Ready",
        status="Unknown",
        reason="Pending",
        message="no operator has looked at this service yet; see `starling check`",
        last_transition_time="1970-01-01T00:00:00Z",
    )
    return {"observedGeneration": 0, "conditions": [waiting.model_dump(by_alias=True)]}


def _resource(kind: str, description: str, spec: Schema, status: Schema) -> Schema:
    return {
        "description": description,
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"{GROUP}/{VERSION}."},
            "kind": {"type": "string", "description": f"{kind}."},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": status,
        },
    }


def _service_columns() -> list[dict[str, Any]]:
    ready = '.status.conditions[?(@.type=="Ready")]'
    return [
        _column("Ready", f"{ready}.status", "Whether the service is as its spec asks."),
        _column("Reason", f"{ready}.reason", "Why it is ready or not."),
        _column("Replicas", ".status.replicas", "Groups that exist.", type="integer"),
        _column("Topology", ".status.topology", "Layout of the groups, as their agents report it."),
        _column(
            "Canary",
            ".status.canary.weight",
            "Percent of the requests that a new revision is tried on.",
            type="integer",
            priority=1,
        ),
        _column("URL", ".status.url", "Base URL of the OpenAI API inside the cluster.", priority=1),
        _column("Age", ".metadata.creationTimestamp", "Since it was created.", type="date"),
    ]


def _scale_columns() -> list[dict[str, Any]]:
    ready = '.status.conditions[?(@.type=="Ready")]'
    return [
        _column("Unit", ".status.unit", "What the sizes count."),
        _column("Desired", ".spec.replicas", "Size asked for.", type="integer"),
        _column("Target", ".status.target", "Size that the groups go to.", type="integer"),
        _column("Effective", ".status.replicas", "Size that all groups serve at.", type="integer"),
        _column("Ready", f"{ready}.status", "Whether all groups serve at the target."),
        _column("Age", ".metadata.creationTimestamp", "Since it was created.", type="date"),
    ]


def _column(name: str, path: str, text: str, *, type: str = "string", priority: int = 0) -> dict[str, Any]:
    return {"name": name, "type": type, "jsonPath": path, "description": text} | ({"priority": priority} if priority else {})
