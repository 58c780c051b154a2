"""After a failure an engine is started again, or its node gives up."""

import pytest
from starling_agent.contract.config import RecoveryConfig
from starling_agent.node.failures import fatal, transient
from starling_agent.node.recovery import GiveUp, Restart, after_failure
from starling_engine.errors import ConfigError, EngineDead, ModelError, UnsupportedModel

DEAD = EngineDead("x")


@pytest.mark.parametrize(
    ("error", "served", "restarts", "now", "decision"),
    [
        (DEAD, True, [], 100, Restart(1)),
        (DEAD, False, [], 100, Restart(1)),
        (DEAD, True, [99], 100, Restart(2)),
        (DEAD, True, [90, 95], 100, Restart(4)),
        (DEAD, True, [80, 90, 95], 100, GiveUp(fatal=False)),
        (DEAD, True, [39, 90, 95], 100, Restart(4)),  # one is out of the window
        (DEAD, True, [1, 2, 3, 4, 5], 100, Restart(1)),  # all are
        (DEAD, True, [40, 50, 60], 100, GiveUp(fatal=False)),  # at its edge it is out, just inside it counts
        (OSError("no space"), False, [], 100, Restart(1)),
        (transient("no token"), False, [99], 100, Restart(2)),
        (ConfigError("x", "block_size"), False, [], 100, GiveUp(fatal=True)),
        (ModelError("x"), False, [], 100, GiveUp(fatal=True)),
        (UnsupportedModel("x"), False, [], 100, GiveUp(fatal=True)),
        (fatal("x"), False, [], 100, GiveUp(fatal=True)),
        (ModelError("x"), True, [99], 100, Restart(2)),  # it has loaded before: not the model's fault
        (ConfigError("memory"), True, [98, 99], 100, Restart(4)),
        (ConfigError("memory"), True, [97, 98, 99], 100, GiveUp(fatal=False)),
    ],
)
def test_an_engine_is_restarted_unless_it_cannot_load_or_failed_too_often(
    error: Exception, served: bool, restarts: list[float], now: float, decision: Restart | GiveUp
):
    recovery = RecoveryConfig(engine_restarts=3, window_seconds=60.0 if 40 not in restarts else 60.5)
    assert after_failure(error, served=served, restarts=restarts, now=now, recovery=recovery) == decision


def test_a_node_without_restarts_gives_up_at_once():
    recovery = RecoveryConfig(engine_restarts=0)
    assert after_failure(DEAD, served=True, restarts=[], now=0, recovery=recovery) == GiveUp(fatal=False)


def test_the_delay_before_a_restart_is_bounded():
    recovery = RecoveryConfig(engine_restarts=100)
    assert after_failure(DEAD, served=True, restarts=[1.0] * 50, now=2, recovery=recovery) == Restart(60.0)
