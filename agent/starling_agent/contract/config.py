"""Configuration of an agent: `agent.json`, which every pod of a revision mounts, and `starling agent --config` reads.

Replicas, data and expert parallel size are not in it: they change without a new revision. A pod's own name, group and addresses
come from the environment; see `identity`.
"""

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starling_crds.layout import GroupLayout

from starling_agent.contract.listening import EVERYWHERE

SCHEMA_VERSION = 1
CONFIG_PATH = "/etc/starling/agent.json"
ENDPOINT_PORT = 8000
ADMIN_PORT = 8001
_PINNED = re.compile(r"hf://[^@]+@[0-9a-f]{40}")


class ContractModel(BaseModel):
    """A message that ignores fields of a later release: an agent may be one release older than its operator, or newer."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class ModelSourceConfig(ContractModel):
    """source as in `spec.model.source`; `pvc://` arrives as the file:// path it is mounted at. cache_dir is writable.

    A download that brings no byte for `download_stall_seconds` starts again. To pin_file the operator writes the commit that all
    pods of the revision load; it may come later than the pod. None: the source is not pinned.
    """

    source: str
    cache_dir: str
    served_names: list[str]
    download_stall_seconds: float = 60.0
    pin_file: str | None = None


def is_pinned(source: str) -> bool:
    """Returns whether a source of the hub names its commit, so that it can never mean anything else."""
    return _PINNED.fullmatch(source) is not None


class ElasticConfig(ContractModel):
    """Bounds of the data parallel size."""

    min: int
    max: int


class LayoutConfig(ContractModel):
    """The fixed part of the layout. `per_node` ranks run in one pod.

    With `elastic` the leader gets each data parallel size while it runs (see `scale`), and `data` is not read.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    per_node: int = 1
    elastic: ElasticConfig | None = None

    def at(self, data: int) -> GroupLayout:
        """Returns the group's layout at a data parallel size."""
        return GroupLayout(tensor=self.tensor, pipeline=self.pipeline, data=data, per_node=self.per_node)

    @property
    def largest(self) -> GroupLayout:
        """Layout at the largest size that the group can have."""
        return self.at(self.elastic.max if self.elastic is not None else self.data)


class RateConfig(ContractModel):
    """Limit of each client: at most `requests` in any `seconds`."""

    requests: int
    seconds: float


class EndpointConfig(ContractModel):
    """service_url: base URL of the Service, for the token that proves it; None where there is no Service.

    response_store: folder for stored responses; None: they are in memory. max_stored_bytes bounds either.
    api_key_secret and tls_secret name the files' Secrets. These may come later than the pod, which waits for them.
    routers_only: until the operator says otherwise requests have to come through routers, which know the tenants and their keys.
    """

    host: str = EVERYWHERE
    port: int = ENDPOINT_PORT
    allowed_origins: list[str] = Field(default_factory=list)
    allowed_hosts: list[str] = Field(default_factory=list)
    prefix_cache_salt: str = "key"
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    whole_tool_calls: bool = False
    max_stored_bytes: int = 64 << 20
    stored_response_seconds: float = 30 * 86_400.0
    response_store: str | None = None
    rate_limit: RateConfig | None = None
    max_body_bytes: int = 32 << 20
    read_seconds: float = 20.0
    connection_seconds: float = 120.0
    api_key_file: str | None = None
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    service_url: str | None = None
    api_key_secret: str | None = None
    tls_secret: str | None = None
    routers_only: bool = False


class AdminConfig(ContractModel):
    """The admin endpoint; a request must bring the token that is in `token_file`."""

    host: str = EVERYWHERE
    port: int = ADMIN_PORT
    token_file: str


class DrainConfig(ContractModel):
    """Seconds, as in `spec.drain`."""

    accept_seconds: float = 5.0
    seconds: float = 120.0


class RecoveryConfig(ContractModel):
    """An engine that died or hung is started again in place at most `engine_restarts` times in `window_seconds`."""

    progress_timeout_seconds: float = 20.0
    engine_restarts: int = 3
    window_seconds: float = 3600.0


class AgentConfig(ContractModel):
    """`engine` holds EngineArgs by name, without `model`; unknown names are refused by the agent and shown in its report."""

    schema_version: int = SCHEMA_VERSION
    namespace: str
    service: str
    revision: str
    model: ModelSourceConfig
    engine: dict[str, Any] = Field(default_factory=dict)
    layout: LayoutConfig = Field(default_factory=LayoutConfig)
    endpoint: EndpointConfig = Field(default_factory=EndpointConfig)
    admin: AdminConfig
    drain: DrainConfig = Field(default_factory=DrainConfig)
    recovery: RecoveryConfig = Field(default_factory=RecoveryConfig)
