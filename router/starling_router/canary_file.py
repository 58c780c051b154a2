"""The canary in a file, for a router that starts: it would share requests by load alone until the operator tells it."""

from pathlib import Path

import structlog
from starling_agent.client.bounded import BadAnswer, parse
from starling_agent.contract.router_report import CanaryNotice

log = structlog.get_logger("starling.router")


def read_canary(file: Path) -> CanaryNotice | None:
    """Returns None where there is no file, as there is none without a canary, and where it cannot be read: requests go on."""
    try:
        return parse(CanaryNotice, file.read_bytes(), "canary")
    except FileNotFoundError:
        return None
    except (OSError, BadAnswer) as error:
        log.error("the canary is not known before the operator tells it", file=str(file), cause=str(error))
        return None
