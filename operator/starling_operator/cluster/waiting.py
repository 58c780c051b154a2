"""Start of the operator: it waits until the API server answers, has the CRDs, and has the operator's key."""

import asyncio
import itertools
import logging
import random
from collections.abc import Callable

from starling_operator.cluster.kinds import INFERENCE_SERVICE, PARALLELISM_SCALE
from starling_operator.cluster.kube import Kube, KubeError
from starling_operator.cluster.operator_key import operator_key

LONGEST_PAUSE = 30.0
log = logging.getLogger(__name__)


async def wait_for_key(kube: Kube, namespace: str, report: Callable[[str | None], None]) -> bytes:
    """Returns the operator's key. `report` is called after each try, with what is missing, and in the end with None."""
    tries = itertools.count()
    while True:
        key, problem = await _read_key(kube, namespace)
        report(problem)
        if problem is None:
            return key
        pause = min(LONGEST_PAUSE, 2.0 ** next(tries)) * random.uniform(0.8, 1.2)
        log.warning("%s; asked again in %.0f s, nothing is done until then", problem, pause)
        await asyncio.sleep(pause)


async def _read_key(kube: Kube, namespace: str) -> tuple[bytes, str | None]:
    """Returns the key, or why there is none."""
    problem = await _problem(kube)
    if problem is not None:
        return b"", problem
    try:
        return await operator_key(kube, namespace), None
    except (KubeError, ValueError) as error:
        return b"", f"the operator has no key: {error}"


async def _problem(kube: Kube) -> str | None:
    try:
        missing = [kind.name for kind in (INFERENCE_SERVICE, PARALLELISM_SCALE) if not await kube.exists(kind)]
    except KubeError as error:
        return f"the API server does not answer: {error}" if error.status == 0 else f"the API server refuses: {error}"
    if not missing:
        return None
    return f"the cluster has no {missing[0]}; install the CRD: starling crds | kubectl apply --server-side -f -"
