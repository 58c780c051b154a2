"""Reads `agent.json`. The report names what is wrong in it, unless the admin endpoint itself cannot be set up."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from starling_agent.contract.config import SCHEMA_VERSION, AdminConfig, AgentConfig, LayoutConfig
from starling_agent.contract.identity import Identity
from starling_agent.node.failures import Unreadable

MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Configuration:
    """`config` is None where `error` names the wrong field; the other attributes are always there."""

    config: AgentConfig | None
    error: str | None
    admin: AdminConfig
    hash: str
    service: str
    revision: str


def read_configuration(path: Path) -> Configuration:
    """Raises Unreadable when the file is no JSON object with a valid `admin` part: nobody could read a report then."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror or error}") from None
    raw = _parse(content, path)
    try:
        admin = AdminConfig.model_validate(raw.get("admin"))
    except ValidationError as error:
        raise Unreadable(f"{path}: {describe(error, 'admin')}") from None
    if not 0 <= admin.port <= MAX_PORT:
        raise Unreadable(f"{path}: admin.port: must be in [0, {MAX_PORT}], got {admin.port}")
    config, error_text = _validate(raw)
    digest = hashlib.sha256(content).hexdigest()
    return Configuration(config, error_text, admin, digest, _name(raw, "service"), _name(raw, "revision"))


def _parse(content: bytes, path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(content)
    except ValueError as error:
        raise Unreadable(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise Unreadable(f"{path} must hold a JSON object, not {type(raw).__name__}")
    return raw


def _validate(raw: dict[str, Any]) -> tuple[AgentConfig | None, str | None]:
    # Checked first: in a newer schema the other fields may be wrong for this release.
    version = raw.get("schema_version", SCHEMA_VERSION)
    if isinstance(version, int) and version > SCHEMA_VERSION:
        return None, f"schema_version: this agent knows versions up to {SCHEMA_VERSION}, got {version}; use a newer agent image"
    try:
        config = AgentConfig.model_validate(raw)
    except ValidationError as error:
        return None, describe(error)
    wrong = wrong_value(config)
    return (None, wrong) if wrong else (config, None)


def wrong_value(config: AgentConfig) -> str | None:
    """Returns the first rule that a value breaks and that types cannot express; None when all hold."""
    recovery, endpoint = config.recovery, config.endpoint
    rules = (
        (bool(config.model.served_names), "model.served_names: at least one name is needed"),
        (config.model.download_stall_seconds > 0, "model.download_stall_seconds: must be above 0"),
        (recovery.progress_timeout_seconds > 0, "recovery.progress_timeout_seconds: must be above 0"),
        (recovery.engine_restarts >= 0, "recovery.engine_restarts: must be at least 0"),
        (recovery.window_seconds > 0, "recovery.window_seconds: must be above 0"),
        (
            (endpoint.tls_cert_file is None) == (endpoint.tls_key_file is None),
            "endpoint.tls_cert_file and endpoint.tls_key_file: give both or neither",
        ),
    )
    return next((message for holds, message in rules if not holds), None)


def layout_error(config: AgentConfig, identity: Identity) -> str | None:
    """Returns why this node cannot take part in the group that was asked for; None when it can."""
    layout = config.layout
    bounds, nodes = layout.elastic, layout.largest.nodes
    sizes = (layout.data,) if bounds is None else (bounds.min, bounds.max)
    wrong = next((wrong for size in sizes if (wrong := _size_error(layout, size)) is not None), None)
    if wrong is None and identity.node >= nodes:
        return f"{identity.pod} is node {identity.node} of group {identity.group}, which has {nodes} nodes by its layout"
    return wrong


def _size_error(layout: LayoutConfig, data: int) -> str | None:
    group = layout.at(data)
    if group.core_fits_nodes and group.fills_nodes:
        return None
    return (
        f"layout.per_node: must divide the {group.core_ranks} ranks of a data parallel rank (pipeline {group.pipeline} * tensor"
        f" {group.tensor}) or be a multiple of them that divides the group's {group.ranks} (data {data}), got {group.per_node}"
    )


def describe(error: ValidationError, *prefix: str) -> str:
    """Names every wrong field with its path: `model.source: field required; ...`."""
    lines = []
    for detail in error.errors():
        path = ".".join(str(part) for part in (*prefix, *detail["loc"]))
        message = detail["msg"][:1].lower() + detail["msg"][1:]
        lines.append(f"{path}: {message}" if path else message)
    return "; ".join(lines)


def _name(raw: dict[str, Any], field: str) -> str:
    value = raw.get(field)
    return value if isinstance(value, str) else "unknown"
