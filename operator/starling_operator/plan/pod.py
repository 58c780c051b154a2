"""The common part of agents' and routers' pods: restricted Pod Security, no right at the API server, time to drain."""

from typing import Any

from starling_crds.v1alpha1.spec import InferenceServiceSpec

from starling_operator.plan import names
from starling_operator.plan.observed import Service, Settings
from starling_operator.plan.volumes import Volume

_USER = 65532
_EXIT_MARGIN = 15
"""Seconds that a pod has left to end its processes after the last stream."""


def pod(
    service: Service, spec: InferenceServiceSpec, settings: Settings, container: dict[str, Any], mounted: list[Volume]
) -> dict[str, Any]:
    """Returns the spec of a pod; `container` has what is its own."""
    common = {
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [volume.mount() for volume in mounted],
    }
    secrets = {"imagePullSecrets": [{"name": name} for name in spec.model.pull_secrets]} if spec.model.pull_secrets else {}
    return {
        "serviceAccountName": names.service_account(service.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # It accepts requests, drains them, and ends its processes.
        "terminationGracePeriodSeconds": spec.drain.accept_seconds + spec.drain.seconds + _EXIT_MARGIN,
        "securityContext": _security(settings),
        "containers": [container | common],
        "volumes": [volume.volume() for volume in mounted if volume.source],
        **secrets,
    }


def _security(settings: Settings) -> dict[str, Any]:
    return {
        "runAsNonRoot": True,
        **({"runAsUser": _USER, "runAsGroup": _USER, "fsGroup": _USER} if settings.fixed_user else {}),
        # Weights on a large volume would otherwise be visited file by file at each start.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def port(name: str, number: int) -> dict[str, Any]:
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def probe(port_name: str, path: str, *, period: int, timeout: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": port_name, "scheme": "HTTP"},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    }


def spread(key: str, pods: dict[str, str]) -> dict[str, Any]:
    """Spreads the pods with these labels over the values of a node's label, where there is room."""
    return {
        "maxSkew": 1,
        "topologyKey": key,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": pods},
    }
