"""Starts the operator's process, and ends it: what went wrong is its last line, and its exit code is 1."""

import asyncio
import logging
import sys

from starling_operator.logs import configure_logs
from starling_operator.main import run
from starling_operator.settings import OperatorSettings


def launch(settings: OperatorSettings, log_level: str) -> None:
    """Returns after a signal; exits with 1 after a failure, so that the pod is started again."""
    configure_logs(log_level)
    try:
        asyncio.run(run(settings))
    except asyncio.CancelledError:
        logging.getLogger(__name__).info("stopped")
    except Exception as error:
        logging.getLogger(__name__).critical("the operator ends: %s", error, exc_info=error)
        sys.exit(1)
