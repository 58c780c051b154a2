"""Before anything else: until the API server answers and knows our kind there is nothing to do but to ask again."""

import asyncio
import itertools
import logging
import random
from collections.abc import Callable

from starling_operator.kinds import INFERENCE_SERVICE, PARALLELISM_SCALE
from starling_operator.kube import ApiError, Kube

LONGEST_PAUSE = 30.0
log = logging.getLogger(__name__)


async def wait_for_api(kube: Kube, tell: Callable[[str | None], None]) -> None:
    """Returns when the cluster has InferenceServices. `tell` gets what it waits for, each time anew, and None in the end."""
    for tries in itertools.count():
        trouble = await _trouble(kube)
        tell(trouble)
        if trouble is None:
            return
        pause = min(LONGEST_PAUSE, 2.0**tries) * random.uniform(0.8, 1.2)
        log.warning("%s; asked again in %.0f s, nothing is done until then", trouble, pause)
        await asyncio.sleep(pause)


async def _trouble(kube: Kube) -> str | None:
    try:
        missing = [kind.name for kind in (INFERENCE_SERVICE, PARALLELISM_SCALE) if not await kube.exists(kind)]
    except ApiError as error:
        return f"the API server does not answer: {error}" if error.status == 0 else f"the API server refuses: {error}"
    if not missing:
        return None
    return f"the cluster has no {missing[0]}; install the CRD: starling crds | kubectl apply --server-side -f -"
