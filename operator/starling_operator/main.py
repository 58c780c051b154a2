"""The operator: handlers that only tell the shell what the API server showed.

There are none of creation, change or deletion, no daemons and no timers: kopf would need finalizers and annotations for them.

    watch -> cache -> wake      here, shell.py, cache.py        agents' reports -> wake     reports.py
    when                        reconciler.py                   who                         lease.py
    observe -> plan             observe.py, plan/               apply -> status -> events   apply.py, status.py, events.py
"""

from typing import Any

import kopf

from starling_operator.cluster.kinds import BY_NAME, GROUP, MANAGER, SERVICE_LABEL, VERSION
from starling_operator.cluster.kube import Kube, connect
from starling_operator.cluster.lease import Lease
from starling_operator.operator import Operator
from starling_operator.settings import OperatorSettings
from starling_operator.watch.watching import configure_kopf

OURS = {"app.kubernetes.io/managed-by": MANAGER}


@kopf.on.startup()
async def start(memo: Operator, settings: kopf.OperatorSettings, **_: Any) -> None:
    configure_kopf(settings)
    await memo.start()


@kopf.on.login()
def log_in(**arguments: Any) -> kopf.ConnectionInfo | None:
    return kopf.login_with_service_account(**arguments) or kopf.login_with_kubeconfig(**arguments)


@kopf.on.event(GROUP, VERSION, "inferenceservices")
@kopf.on.event(GROUP, VERSION, "parallelismscales", labels=OURS)
@kopf.on.event("", "v1", "pods", labels={SERVICE_LABEL: kopf.PRESENT})
@kopf.on.event("apps", "v1", "statefulsets", labels=OURS)
@kopf.on.event("apps", "v1", "controllerrevisions", labels=OURS)
@kopf.on.event("", "v1", "services", labels=OURS)
@kopf.on.event("", "v1", "configmaps", labels=OURS)
@kopf.on.event("", "v1", "serviceaccounts", labels=OURS)
@kopf.on.event("policy", "v1", "poddisruptionbudgets", labels=OURS)
@kopf.on.event("networking.k8s.io", "v1", "networkpolicies", labels=OURS)
async def seen(event: Any, memo: Operator, **_: Any) -> None:
    memo.seen(BY_NAME[event["object"]["kind"]], event["type"], event["object"])


@kopf.on.cleanup()
async def stop(memo: Operator, **_: Any) -> None:
    await memo.close()


async def run(settings: OperatorSettings) -> None:
    """Until a signal comes or the Lease is lost; raises what went wrong."""
    lease = Lease(settings.plan.operator_namespace, settings.lease_name, settings.identity)
    kube = Kube(await connect(), lease.fence)
    shell = Operator(settings, kube, lease)
    # Without an identity kopf makes one of the user's name, and in a container the user need not have one.
    scope: dict[str, Any] = {"identity": settings.identity, "standalone": True, "namespaces": settings.namespaces}
    await kopf.operator(memo=shell, stop_flag=shell.stop, clusterwide=not settings.namespaces, **scope)
    if shell.failure is not None:
        raise shell.failure
