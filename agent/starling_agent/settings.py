"""The endpoint's settings, resolved and frozen at start-up."""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from starling_engine.errors import ConfigError

from starling_agent.api_keys import ApiKeys
from starling_agent.file_token import FileToken
from starling_agent.parsers.families import PARSER_NAMES
from starling_agent.routers_only import RoutersOnly

MIB = 1024 * 1024
READ_SECONDS = 20.0
STORED_SECONDS = 30 * 86_400.0
SALTS = ("key", "none")
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class RateLimit:
    """A limit of `requests` in any `seconds`, for each API key (without keys: for each client address)."""

    requests: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM form; the certificate's file may hold its chain."""

    cert_file: str
    key_file: str


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of the endpoint; the engine has its own.

    served_model_names   names that requests may give as `model`; answers have the first
    api_keys             keys of which a request must have one; none: the endpoint is open
    allowed_hosts        host names that it answers for, as well as addresses and localhost; none: all
    prefix_cache_salt    key: a cached prefix is found only with the API key of the request that cached it; none: with any
    max_body_bytes       larger request bodies get 413
    read_seconds         time for a request's header, and for its body, with a second more for each KiB of it
    connection_seconds   a connection older than half to all of it is closed with its next answer; 0: never
    max_prompts          prompts (or embedding inputs) in one request
    accept_seconds       time after SIGTERM in which new requests are still served, since load balancers lag behind; each of
                         them lets the server accept for as long again, to half of the drain
    drain_seconds        time after that for open requests, which then end with an error
    trust_chat_template  a request may have a chat template of its own, which runs in another process
    tool_call_parser     the format in which the model calls tools, auto (its template's), or none
    reasoning_parser     the format that marks its reasoning, auto, or none
    max_stored_bytes     memory for responses that can be continued, or room for them in response_store; older ones give way
    stored_response_seconds  a response is stored for so long; OpenAI keeps them for 30 days, too
    response_store       folder for them, which pods may share and which outlives them; None: they are in memory
    pod                  name of this pod, which the ids of its responses have; empty: it is none
    group, revision      of the pod, which routers show; empty: it is of none
    router_token         what routers show, to resume streams and to be told what is cached; None: none is believed
    routers_only         whether requests have to show it; None: never
    whole_tool_calls     a call leaves when it is complete; one that was cut does not
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    api_keys: ApiKeys = field(default_factory=ApiKeys)
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    prefix_cache_salt: str = "key"
    rate_limit: RateLimit | None = None
    max_body_bytes: int = 32 * MIB
    read_seconds: float = READ_SECONDS
    connection_seconds: float = 120.0
    max_prompts: int = 2048
    accept_seconds: float = 5.0
    drain_seconds: float = 120.0
    trust_chat_template: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    whole_tool_calls: bool = False
    max_stored_bytes: int = 64 * MIB
    stored_response_seconds: float = STORED_SECONDS
    response_store: Path | None = None
    pod: str = ""
    group: str = ""
    revision: str = ""
    router_token: FileToken | None = None
    routers_only: RoutersOnly | None = None
    log_level: str = "info"
    log_requests: bool = False
    log_prompts: bool = False
    access_log: bool = True

    def __post_init__(self) -> None:
        """Raises ConfigError naming the first setting that cannot be used."""
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(f"must be one of {', '.join(LOG_LEVELS)}, got {self.log_level!r}", "log_level")
        if wrong := [name for name in self.allowed_hosts if not _HOST.fullmatch(name)]:
            raise ConfigError(f"must be names without scheme and port, or *.NAME, got {wrong[0]!r}", "allowed_hosts")
        if self.prefix_cache_salt not in SALTS:
            raise ConfigError(f"must be one of {', '.join(SALTS)}, got {self.prefix_cache_salt!r}", "prefix_cache_salt")
        for name in ("tool_call_parser", "reasoning_parser"):
            if (value := getattr(self, name)) not in PARSER_NAMES:
                raise ConfigError(f"must be one of {', '.join(PARSER_NAMES)}, got {value!r}", name)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"must be in [0, 65535], got {self.port}", "port")
        if self.max_stored_bytes < 0:
            raise ConfigError(f"must be at least 0, got {self.max_stored_bytes}", "max_stored_bytes")
        if self.max_body_bytes < 1:
            raise ConfigError(f"must be at least 1, got {self.max_body_bytes}", "max_body_bytes")
        for name in ("read_seconds", "stored_response_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"must be a time in seconds, got {getattr(self, name)}", name)
        for name in ("connection_seconds", "accept_seconds", "drain_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"must be a time in seconds, got {getattr(self, name)}", name)
