"""Before anything else: until the API server answers, knows our kind and has our key there is nothing to do but to ask again."""

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


async def wait_for_key(kube: Kube, namespace: str, tell: Callable[[str | None], None]) -> bytes:
    """The operator's key, when the cluster has InferenceServices. `tell` gets what it waits for each time, and None in the end."""
    tries = itertools.count()
    while True:
        key, trouble = await _look(kube, namespace)
        tell(trouble)
        if trouble is None:
            return key
        pause = min(LONGEST_PAUSE, 2.0 ** next(tries)) * random.uniform(0.8, 1.2)
        log.warning("%s; asked again in %.0f s, nothing is done until then", trouble, pause)
        await asyncio.sleep(pause)


async def _look(kube: Kube, namespace: str) -> tuple[bytes, str | None]:
    """The key, and why there is none."""
    trouble = await _trouble(kube)
    if trouble is not None:
        return b"", trouble
    try:
        return await operator_key(kube, namespace), None
    except (KubeError, ValueError) as error:
        return b"", f"the operator has no key: {error}"


async def _trouble(kube: Kube) -> str | None:
    try:
        missing = [kind.name for kind in (INFERENCE_SERVICE, PARALLELISM_SCALE) if not await kube.exists(kind)]
    except KubeError as error:
        return f"the API server does not answer: {error}" if error.status == 0 else f"the API server refuses: {error}"
    if not missing:
        return None
    return f"the cluster has no {missing[0]}; install the CRD: starling crds | kubectl apply --server-side -f -"
