"""When tiers outside that answer, but take longer than computing, are passed by; told in the log when it begins and ends."""

import logging

from starling_engine.kv_offload.costs import PROBE, Costs
from starling_engine.kv_offload.log_throttle import Seldom

logger = logging.getLogger("starling.offload")


class Bypass:
    """Asked for each request that could ask the tiers outside; `now` is in seconds, by any clock."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._passed = 0
        self._slow = Seldom()
        self._told = False
        """Whether the log's last word is that the tiers are slow."""

    def passes(self, now: float) -> bool:
        """Whether the request is to compute rather than to ask."""
        pays = self._costs.asking_pays()
        if pays and self._told:
            logger.info("the KV tiers outside are quicker than computing again: every request asks them")
            self._told = False
        elif not pays and self._slow.is_due(now):
            logger.warning(
                "the KV tiers outside take longer than computing what they find; asked once in %d requests till they are quicker",
                PROBE,
            )
            self._told = True
        return not pays

    def probe_is_due(self) -> bool:
        """Of so many requests that passed, one is to ask without waiting for it."""
        self._passed += 1
        return self._passed % PROBE == 0
