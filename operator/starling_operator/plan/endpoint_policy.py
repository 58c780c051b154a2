"""The NetworkPolicy of a service's agents: who reaches which of their ports.

Behind routers their endpoint is for routers, a Gateway's proxies and scrapers. Clients that were led to agents have time before it
closes, and it opens before they are led there again: network plugins follow late. So no request is refused.
"""

import math
from typing import Any

from starling_agent.contract.config import ADMIN_PORT, ENDPOINT_PORT
from starling_agent.contract.router import seconds_to_leave
from starling_crds.v1alpha1.spec import InferenceServiceSpec

from starling_operator.plan import labels
from starling_operator.plan.gateway import pick_ingress
from starling_operator.plan.labels import child
from starling_operator.plan.observed import Manifest, Observed
from starling_operator.plan.timestamps import read_time, rfc3339

OPEN_SECONDS = 5.0
"""Network plugins have so long to open the endpoint before clients are led to it."""
OPEN_SINCE = "serving.starling.dev/open-since"
"""Annotation of the policy: since when the endpoint is open to all although clients are led to routers."""
_ENDPOINT = {"port": ENDPOINT_PORT, "protocol": "TCP"}
_TO_ALL = {"ports": [_ENDPOINT]}
_STORE_PORTS = {"port": 15000, "endPort": 17000, "protocol": "TCP"}
"""Range from which Mooncake's transfer engine takes free ports."""


def network_policy(observed: Observed, spec: InferenceServiceSpec, *, to_routers: bool) -> Manifest:
    """Opens the endpoint to all or to those above, every port to the service's own pods, and the admin port to the operator.

    Pods that use a store read from each other's memory: agents of the same namespace reach the ports for it. Agents of other
    namespaces do not, since anybody there can give a pod any label.
    """
    service, settings = observed.service, observed.settings
    pods = {labels.SERVICE: service.name}
    to_store = {"from": [{"podSelector": {"matchLabels": labels.AGENTS}}], "ports": [_STORE_PORTS]}
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": settings.operator_namespace}},
        "podSelector": {"matchLabels": dict(settings.operator_labels)},
    }
    closes = seconds_to_close(observed, spec, to_routers=to_routers)
    made = child(service, "networking.k8s.io/v1", "NetworkPolicy", service.name) | {
        "spec": {
            "podSelector": {"matchLabels": pods},
            "policyTypes": ["Ingress"],
            "ingress": [
                _TO_ALL if closes else {"from": _behind_routers(observed, spec), "ports": [_ENDPOINT]},
                {"from": [{"podSelector": {"matchLabels": pods}}]},
                {"from": [operator], "ports": [{"port": ADMIN_PORT, "protocol": "TCP"}]},
                *([to_store] if spec.kv_cache.store is not None else []),
            ],
        }
    }
    if to_routers and closes:
        made["metadata"]["annotations"] = {OPEN_SINCE: _open_since(observed) or rfc3339(observed.now)}
    return made


def seconds_to_close(observed: Observed, spec: InferenceServiceSpec, *, to_routers: bool) -> float:
    """Returns for how long the endpoint stays open to all: infinitely without routers, or where the proxies are not known."""
    if spec.router is None or not to_routers or (spec.has_pool and not _proxies(observed, spec)):
        return math.inf
    live, since = _live(observed), _open_since(observed)
    if live is None or not _is_open(live):
        return 0.0
    seconds = seconds_to_leave(spec.endpoint.limits.connection_seconds)
    return seconds if since is None else max(0.0, read_time(since) + seconds - observed.now)


def seconds_to_open(observed: Observed) -> float:
    """Returns for how long clients must not be led to agents yet."""
    live, since = _live(observed), _open_since(observed)
    if live is None:
        return 0.0
    if not _is_open(live):
        return OPEN_SECONDS
    return 0.0 if since is None else max(0.0, read_time(since) + OPEN_SECONDS - observed.now)


def _behind_routers(observed: Observed, spec: InferenceServiceSpec) -> list[dict[str, Any]]:
    routers = {"podSelector": {"matchLabels": labels.router_selector(observed.service)}}
    return [routers, *_proxies(observed, spec), *(dict(peer) for peer in observed.settings.metrics_from)]


def _proxies(observed: Observed, spec: InferenceServiceSpec) -> list[dict[str, Any]]:
    """A Gateway's proxies: they may ask routers to pick, and send requests to agents themselves."""
    return [peer for rule in pick_ingress(observed, spec) for peer in rule["from"]]


def _live(observed: Observed) -> Manifest | None:
    return observed.live("NetworkPolicy", observed.service.name)


def _is_open(policy: Manifest) -> bool:
    return any(not rule.get("from") and _ENDPOINT in (rule.get("ports") or ()) for rule in policy["spec"].get("ingress") or ())


def _open_since(observed: Observed) -> str | None:
    live = _live(observed)
    found: str | None = ((live or {}).get("metadata", {}).get("annotations") or {}).get(OPEN_SINCE)
    return found
