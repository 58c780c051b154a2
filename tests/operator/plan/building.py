"""Specs, pods, reports and groups for the tests of the planner: each is healthy unless a field says otherwise."""

import base64
import copy
from collections.abc import Iterable
from typing import Any

from starling_agent.contract.report import Report, Topology
from starling_crds.v1alpha1.spec import InferenceServiceSpec
from starling_crds.v1alpha1.status import GroupNode, GroupStatus, InferenceServiceStatus
from starling_operator.plan.group import Group
from starling_operator.plan.observed import Observed, Pod, Service, Settings

NOW = 1_800_000_000.0
SETTINGS = Settings(agent_image="registry.example/starling-agent:1")
TOKEN = "a-token"
HASH = "c0ffee" * 8


def make_spec(changes: dict[str, Any] | None = None) -> InferenceServiceSpec:
    """`changes` in camelCase, merged into the smallest spec."""
    return InferenceServiceSpec.model_validate(merged({"model": {"source": "hf://org/name"}}, changes or {}))


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(base)
    for name, value in changes.items():
        both = isinstance(value, dict) and isinstance(result.get(name), dict)
        result[name] = merged(result[name], value) if both else value
    return result


def make_service(spec: InferenceServiceSpec | None = None, **fields: Any) -> Service:
    given: dict[str, Any] = {
        "name": "chat",
        "namespace": "prod",
        "uid": "service-uid",
        "generation": 1,
        "resource_version": "1",
        "spec": spec if spec is not None or "spec_error" in fields else make_spec(),
    }
    return Service(**(given | fields))


def make_observed(spec: InferenceServiceSpec | None = None, *, settings: Settings = SETTINGS, **fields: Any) -> Observed:
    given = {"service": make_service(spec), "settings": settings, "now": NOW, "token": TOKEN}
    return Observed(**(given | fields))


def make_report(**fields: Any) -> Report:
    """Makes the report of an agent that serves on one rank."""
    given: dict[str, Any] = {
        "version": 7,
        "incarnation": "i",
        "agent": "0.1.0",
        "config_hash": HASH,
        "service": "chat",
        "revision": "aaaaaaa",
        "group": "chat-aaaaaaa-0",
        "node": 0,
        "pod": "chat-aaaaaaa-0-0",
        "phase": "serving",
        "ready": True,
        "token_seen": True,
        "service_token_seen": None,
        "topology": Topology(tensor=1, pipeline=1, data=1, ranks=1),
    }
    return Report(**(given | fields))


def make_pod(group: str = "chat-aaaaaaa-0", number: int = 0, **fields: Any) -> Pod:
    """A pod that serves."""
    given: dict[str, Any] = {
        "name": f"{group}-{number}",
        "uid": f"uid-{group}-{number}",
        "group": group,
        "revision": group.split("-")[-2],
        "number": number,
        "cluster_node": f"node-{number}",
        "address": f"10.0.0.{number + 1}",
        "phase": "Running",
        "scheduled": True,
        "ready": True,
        "created_at": NOW - 1000,
        "report": make_report(),
        "report_age": 1.0,
    }
    return Pod(**(given | fields))


def pending(**fields: Any) -> dict[str, Any]:
    """Fields of a pod that waits for a node."""
    return {"phase": "Pending", "scheduled": False, "ready": False, "report": None, "report_age": None, "address": ""} | fields


def make_group(name: str = "chat-aaaaaaa-0", pods: Iterable[Pod] | None = None, **fields: Any) -> Group:
    """Makes a group of the target revision, with one serving pod unless `pods` says otherwise."""
    members = tuple(pods) if pods is not None else tuple(make_pod(name, number) for number in range(fields.get("nodes", 1)))
    given: dict[str, Any] = {
        "name": name,
        "revision": name.split("-")[-2],
        "uid": f"uid-{name}",
        "nodes": max(1, len(members)),
        "target": True,
        "pods": members,
    }
    return Group(**(given | fields))


def record(group: Group, **fields: Any) -> GroupStatus:
    """Makes the record that a status has of the group after it served."""
    nodes = [GroupNode(pod=pod.name, number=pod.number, uid=pod.uid, restarts=pod.restarts) for pod in group.pods]
    given: dict[str, Any] = {"name": group.name, "revision": group.revision, "index": group.index, "served": True, "nodes": nodes}
    return GroupStatus(**(given | fields))


def conditions_of(status: InferenceServiceStatus) -> dict[str, tuple[str, str]]:
    """{"Ready": ("True", "Serving"), ...}."""
    return {condition.type: (condition.status, condition.reason) for condition in status.conditions}


def message_of(status: InferenceServiceStatus, kind: str) -> str:
    return next(condition.message for condition in status.conditions if condition.type == kind)


def decoded(text: str) -> str:
    return base64.b64decode(text).decode()
