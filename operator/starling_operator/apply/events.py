"""Kubernetes Events about a service, for `kubectl describe` and `kubectl events`."""

import logging
import secrets
from collections.abc import Iterable
from datetime import UTC, datetime

from starling_operator.cluster.kinds import EVENT, INFERENCE_SERVICE, MANAGER
from starling_operator.cluster.kube import Kube, KubeError
from starling_operator.logs import about
from starling_operator.plan.decision import Event
from starling_operator.plan.observed import Manifest, Service

_LONGEST_NOTE = 1000
log = logging.getLogger(__name__)


async def post_events(kube: Kube, service: Service, events: Iterable[Event], instance: str) -> None:
    """Posts events. One that cannot be posted is only logged, for the status says the same and lasts longer."""
    for event in events:
        log.info("%s: %s", event.reason, event.message, extra=about((service.namespace, service.name)))
        try:
            await kube.create(EVENT.path(service.namespace), _body(service, event, instance))
        except KubeError as error:
            log.warning("the event %s was not posted: %s", event.reason, error, extra=about((service.namespace, service.name)))


def _body(service: Service, event: Event, instance: str) -> Manifest:
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.name,
        "metadata": {"name": f"{service.name}.{secrets.token_hex(8)}", "namespace": service.namespace},
        "eventTime": datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "type": event.type,
        "reason": event.reason,
        "action": "Reconcile",
        "note": event.message[:_LONGEST_NOTE],
        "reportingController": f"serving.starling.dev/{MANAGER}",
        "reportingInstance": instance[:128],
        "regarding": {
            "apiVersion": INFERENCE_SERVICE.api_version,
            "kind": INFERENCE_SERVICE.name,
            "name": service.name,
            "namespace": service.namespace,
            "uid": service.uid,
        },
    }
