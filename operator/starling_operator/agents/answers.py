"""What an agent answers, read within bounds: whoever may run a pod chooses its bytes, and one pod must not end the operator."""

from collections.abc import AsyncIterable, Iterable, Iterator
from typing import Any

from pydantic import ValidationError
from starling_agent.contract.report import Report

MOST_BYTES = 256 * 1024
"""Several times the report of a group of a thousand ranks."""
MOST_SECONDS = 10.0
"""For an answer that nobody has to wait for."""
_LONGEST_WORDS = 2000
PLAIN = {"Accept-Encoding": "identity"}
"""A compressed answer could be a thousand times as long as what is counted; it is refused by not being JSON."""


class BadAnswer(ValueError):
    """An answer that is too long, or no report. Its words are short, and hold nothing that was sent but names of fields."""


async def received(chunks: AsyncIterable[bytes], most: int = MOST_BYTES) -> bytes:
    """All of an answer. Raises BadAnswer as soon as it is longer than `most` bytes."""
    data = bytearray()
    async for chunk in chunks:
        _add(data, chunk, most)
    return bytes(data)


def received_at_once(chunks: Iterable[bytes], most: int = MOST_BYTES) -> bytes:
    """The same for a client that waits."""
    data = bytearray()
    for chunk in chunks:
        _add(data, chunk, most)
    return bytes(data)


def read_report(data: bytes) -> Report:
    """Without what no decision reads: it would only take memory. Raises BadAnswer."""
    try:
        report = Report.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise BadAnswer(f"its report cannot be read: {field + ': ' if field else ''}{first['msg']}"[:300]) from None
    operation = report.operation
    if operation is not None:
        operation = operation.model_copy(update={"loaded": {}, "error": _shortened(operation.error)})
    kept: dict[str, Any] = {"ranks": [], "starts": [], "last_error": _shortened(report.last_error), "operation": operation}
    return report.model_copy(update=kept)


def lines(chunks: Iterable[bytes], most: int = MOST_BYTES) -> Iterator[str]:
    """Of a stream that may be endless. Raises BadAnswer for one line that is longer than `most` bytes."""
    rest = bytearray()
    for chunk in chunks:
        _add(rest, chunk, most)
        *whole, rest = rest.split(b"\n")
        yield from (line.decode(errors="replace").rstrip("\r") for line in whole)
    yield rest.decode(errors="replace")


def _shortened(words: str | None) -> str | None:
    return words and words[:_LONGEST_WORDS]


def _add(data: bytearray, chunk: bytes, most: int) -> None:
    if len(data) + len(chunk) > most:
        raise BadAnswer(f"its answer is longer than {most} bytes")
    data += chunk
