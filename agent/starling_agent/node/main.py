"""The agent's process: reads its identity and configuration, runs, and prints the cause of its end as the last line.

Kubernetes shows the end of a failed container's log as its termination message, so people see that line first.
"""

import asyncio
import sys
from pathlib import Path

import structlog
import uvloop
from starling_engine.errors import ConfigError

from starling_agent.contract.identity import Identity, read_identity
from starling_agent.logs import configure_logs
from starling_agent.node.configuration import Configuration, read_configuration
from starling_agent.node.failures import FAILED_EXIT_CODE, UNREADABLE_EXIT_CODE, Unreadable
from starling_agent.node.node import ExitStatus, run_node
from starling_agent.server.process_memory import give_large_blocks_back

log = structlog.get_logger("starling.agent")


def main(path: Path) -> int:
    """Returns the exit code."""
    give_large_blocks_back()
    try:
        identity = read_identity()
        configuration = read_configuration(path)
    except (Unreadable, ValueError) as error:
        return _end(ExitStatus(UNREADABLE_EXIT_CODE, str(error)))
    configure_logs("info", {"pod": identity.pod, "group": identity.group, "service": configuration.service})
    return _end(_run(configuration, identity))


def _run(configuration: Configuration, identity: Identity) -> ExitStatus:
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            exit_status = runner.run(run_node(configuration, identity))
    except ConfigError as error:
        return ExitStatus(FAILED_EXIT_CODE, str(error))
    except Exception as error:
        log.exception("a fault of the agent")
        return ExitStatus(FAILED_EXIT_CODE, f"{type(error).__name__}: {error}")
    log.info("ended", exit_code=exit_status.code)
    return exit_status


def _end(exit_status: ExitStatus) -> int:
    if exit_status.cause is not None:
        print(exit_status.cause, file=sys.stderr, flush=True)
    return exit_status.code
