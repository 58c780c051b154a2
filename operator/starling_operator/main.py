"""The operator's process: kopf's handlers pass what the watches show to the Operator.

kopf's handlers of creation, change and deletion, its daemons and its timers are not used: they need finalizers and annotations.

    watch -> cache -> wake up   main.py, operator.py, watch/cache.py
    agents' reports -> wake up  agents/reports.py, agents/routers.py
    which service, and when     reconciler.py
    which replica may write     cluster/lease.py
    observe -> plan             watch/observe.py, plan/
    apply -> status -> events   apply/applier.py, apply/status.py, apply/events.py
"""

import asyncio
import logging
import sys
from typing import Any

import kopf

from starling_operator.cluster.kinds import BY_NAME, GROUP, MANAGER, VERSION
from starling_operator.cluster.kube import Kube, connect
from starling_operator.cluster.lease import Lease
from starling_operator.logs import configure_logs
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
@kopf.on.event("", "v1", "pods", labels=OURS)
@kopf.on.event("apps", "v1", "statefulsets", labels=OURS)
@kopf.on.event("apps", "v1", "deployments", labels=OURS)
@kopf.on.event("apps", "v1", "controllerrevisions", labels=OURS)
@kopf.on.event("", "v1", "services", labels=OURS)
@kopf.on.event("", "v1", "configmaps", labels=OURS)
@kopf.on.event("", "v1", "serviceaccounts", labels=OURS)
@kopf.on.event("policy", "v1", "poddisruptionbudgets", labels=OURS)
@kopf.on.event("networking.k8s.io", "v1", "networkpolicies", labels=OURS)
async def on_event(event: Any, memo: Operator, **_: Any) -> None:
    memo.on_event(BY_NAME[event["object"]["kind"]], event["type"], event["object"])


@kopf.on.cleanup()
async def stop(memo: Operator, **_: Any) -> None:
    await memo.close()


async def run(settings: OperatorSettings) -> None:
    """Runs until a signal comes or the Lease is lost. Raises the failure that ended it."""
    lease = Lease(settings.plan.operator_namespace, settings.lease_name, settings.identity)
    kube = Kube(await connect(), lease.fence)
    operator = Operator(settings, kube, lease)
    # Without an identity kopf makes one of the user's name, and in a container the user need not have one.
    scope: dict[str, Any] = {"identity": settings.identity, "standalone": True, "namespaces": settings.namespaces}
    await kopf.operator(memo=operator, stop_flag=operator.stop, clusterwide=not settings.namespaces, **scope)
    if operator.failure is not None:
        raise operator.failure


def launch(settings: OperatorSettings, log_level: str) -> None:
    """Returns after a signal. Exits with 1 after a failure, which is the last line of the log, so that the pod is started again."""
    configure_logs(log_level)
    try:
        asyncio.run(run(settings))
    except asyncio.CancelledError:
        logging.getLogger(__name__).info("stopped")
    except Exception as error:
        logging.getLogger(__name__).critical("the operator ends: %s", error, exc_info=error)
        sys.exit(1)
