"""Structured logs on standard error: text on a terminal, JSON otherwise. Prompts are in them only if configured."""

import logging
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

import structlog

_SHARED: list[Any] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]


class _StandardError(logging.StreamHandler[Any]):
    """Looks up sys.stderr for each line: while a spinner turns, rich replaces it to keep lines apart from the spinner."""

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, stream: Any) -> None:
        """Ignores the stream that the base class found at construction."""


def _with(fields: Mapping[str, str]) -> Any:
    def add(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        return {**event, **fields}

    return add


def configure_logs(level: str, fields: Mapping[str, str] | None = None) -> None:
    """Gives Starling's loggers and the standard library's (uvicorn's) one format; every line gets `fields` too."""
    # Not by context variables: lines of the engine core come from a thread without this context.
    shared = [*_SHARED, *([_with(fields)] if fields else [])]
    terminal = sys.stderr.isatty()
    tail: list[Any] = [] if terminal else [structlog.processors.format_exc_info]
    renderer: Any = structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer()
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *tail, renderer],
    )
    handler = _StandardError()
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    # Their lines only repeat Starling's own.
    for name in ("uvicorn", "uvicorn.access", "uvicorn.error", "httpx"):
        logging.getLogger(name).handlers = []
        logging.getLogger(name).setLevel(logging.WARNING)
