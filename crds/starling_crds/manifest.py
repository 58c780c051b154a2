"""The CustomResourceDefinition: generated from the types, so that the two cannot differ."""

from typing import Any

import yaml

from starling_crds.rules import VALIDATIONS, Rule
from starling_crds.schema import Schema, structural
from starling_crds.v1alpha1.spec import InferenceServiceSpec
from starling_crds.v1alpha1.status import InferenceServiceStatus
from starling_crds.v1alpha1.strings import SERVICE_NAME

GROUP, VERSION, KIND, PLURAL = "serving.starling.dev", "v1alpha1", "InferenceService", "inferenceservices"
FILE_NAME = f"{PLURAL}.{GROUP}.yaml"

_NAME_RULE = Rule(
    cel=SERVICE_NAME.cel.replace("self", "self.metadata.name"),
    holds=lambda body: SERVICE_NAME.holds(body.metadata.name),
    message="metadata.name " + SERVICE_NAME.message.replace("{self}", "{metadata.name}"),
)


def inferenceservice_crd() -> dict[str, Any]:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["infsvc"],
                "categories": ["starling"],
            },
            "versions": [_version()],
        },
    }


def crd_yaml() -> str:
    """Block style, in the order of the types: a reader can follow it."""
    return yaml.dump(inferenceservice_crd(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Writes a list that is used twice twice, not as an anchor."""

    def ignore_aliases(self, data: Any) -> bool:
        del data
        return True


def _version() -> dict[str, Any]:
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": _resource()},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": _columns(),
    }


def _resource() -> Schema:
    return {
        "description": "A large language model that is served by an OpenAI endpoint inside the cluster.",
        "type": "object",
        "required": ["spec"],
        VALIDATIONS: [_NAME_RULE.validation()],
        "properties": {
            "apiVersion": {"type": "string", "description": f"{GROUP}/{VERSION}."},
            "kind": {"type": "string", "description": f"{KIND}."},
            "metadata": {"type": "object"},
            "spec": structural(InferenceServiceSpec),
            "status": structural(InferenceServiceStatus, defaults=False),
        },
    }


def _columns() -> list[dict[str, Any]]:
    ready = '.status.conditions[?(@.type=="Ready")]'
    return [
        _column("Ready", f"{ready}.status", "Whether the service is as its spec asks."),
        _column("Reason", f"{ready}.reason", "Why it is ready or not."),
        _column("Replicas", ".status.replicas", "Groups that exist.", type="integer"),
        _column("Topology", ".status.topology", "Layout of the groups, as their agents report it."),
        _column("URL", ".status.url", "Base URL of the OpenAI API inside the cluster.", priority=1),
        _column("Age", ".metadata.creationTimestamp", "Since it was created.", type="date"),
    ]


def _column(name: str, path: str, text: str, *, type: str = "string", priority: int = 0) -> dict[str, Any]:
    return {"name": name, "type": type, "jsonPath": path, "description": text} | ({"priority": priority} if priority else {})
