"""Log lines from a child to its parent: one JSON object a line on standard error, so that the parent's own logging shapes it."""

import logging

import msgspec

EXIT_LOGGER = "starling.exit"
"""Logger whose message says why the engine core ended."""


class LogLine(msgspec.Struct):
    level: str
    logger: str
    message: str


_decode = msgspec.json.Decoder(LogLine).decode


class LogLineFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return msgspec.json.encode(LogLine(record.levelname, record.name, super().format(record))).decode()


def parse_line(raw: bytes) -> LogLine:
    """Parses a line; any other text (a library's own message, a crash report) becomes a warning."""
    try:
        return _decode(raw)
    except msgspec.DecodeError:
        return LogLine("WARNING", "starling.core", raw.decode(errors="replace").rstrip())
