"""Decides after a failure of the engine: start it again after a delay, or give up. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from starling_engine.errors import ConfigError, ModelError

from starling_agent.contract.config import RecoveryConfig
from starling_agent.node.failures import NodeFailure

MAX_DELAY = 60.0


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the engine again after `delay` seconds."""

    delay: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """`fatal`: a new pod would not help either."""

    fatal: bool


def after_failure(
    error: Exception, *, served: bool, restarts: Sequence[float], now: float, recovery: RecoveryConfig
) -> Restart | GiveUp:
    """`restarts` holds the times of earlier restarts, on the clock of `now`; `served`: an engine has served before.

    Arguments and model have then proved good, so another start may succeed whatever the error says.
    """
    if not served and is_fatal(error):
        return GiveUp(fatal=True)
    recent = sum(1 for restart in restarts if now - restart < recovery.window_seconds)
    if recent >= recovery.engine_restarts:
        return GiveUp(fatal=False)
    return Restart(min(2.0**recent, MAX_DELAY))


def is_fatal(error: Exception) -> bool:
    return isinstance(error, ConfigError | ModelError) or (isinstance(error, NodeFailure) and error.fatal)
