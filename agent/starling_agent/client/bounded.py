"""Reading of answers within bounds: who runs a pod chooses its bytes, and one pod must not end its caller."""

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from starling_agent.contract.report import Report

MOST_BYTES = 256 * 1024
"""Several times the report of a group of a thousand ranks."""
UNCOMPRESSED = {"Accept-Encoding": "identity"}
"""Headers of each request. A compressed answer could be a thousand times as long as its counted bytes; it fails as JSON."""
_LONGEST_ERROR = 2000
_Model = TypeVar("_Model", bound=BaseModel)


class BadAnswer(ValueError):
    """An answer of the wrong form. The message is short; of what was sent it holds only names of fields."""


class AnswerTooLong(BadAnswer):
    """An answer that goes on past its bound."""


async def read_all(chunks: AsyncIterable[bytes], most: int = MOST_BYTES) -> bytes:
    """Returns the whole answer. Raises AnswerTooLong as soon as it is longer than `most` bytes."""
    data = bytearray()
    async for chunk in chunks:
        _add(data, chunk, most)
    return bytes(data)


def read_all_sync(chunks: Iterable[bytes], most: int = MOST_BYTES) -> bytes:
    """Returns the same as `read_all` for a client that blocks."""
    data = bytearray()
    for chunk in chunks:
        _add(data, chunk, most)
    return bytes(data)


def read_lines(chunks: Iterable[bytes], most: int = MOST_BYTES) -> Iterator[str]:
    """Yields lines of a stream that may be endless. Raises AnswerTooLong for a line that is longer than `most` bytes."""
    rest = bytearray()
    for chunk in chunks:
        _add(rest, chunk, most)
        *whole, rest = rest.split(b"\n")
        yield from (line.decode(errors="replace").rstrip("\r") for line in whole)
    yield rest.decode(errors="replace")


async def lines_of(chunks: AsyncIterable[bytes], most: int = MOST_BYTES) -> AsyncIterator[bytes]:
    """Yields whole lines of a stream. Raises AnswerTooLong where one has not ended after `most` bytes."""
    rest = b""
    async for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line
        if len(rest) > most:
            raise AnswerTooLong(f"a line of its answer is longer than {most} bytes")


def parse_report(data: bytes) -> Report:
    """Returns the report without the parts that no decision reads: they would only take memory. Raises BadAnswer."""
    report = parse(Report, data, "report")
    operation = report.operation
    if operation is not None:
        operation = operation.model_copy(update={"loaded": {}, "error": _shortened(operation.error)})
    changes: dict[str, Any] = {"ranks": [], "starts": [], "last_error": _shortened(report.last_error), "operation": operation}
    return report.model_copy(update=changes)


def parse(model: type[_Model], data: bytes, name: str) -> _Model:
    """Raises BadAnswer naming the first field that is wrong."""
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise BadAnswer(f"its {name} cannot be read: {field + ': ' if field else ''}{first['msg']}"[:300]) from None


def _shortened(words: str | None) -> str | None:
    return words and words[:_LONGEST_ERROR]


def _add(data: bytearray, chunk: bytes, most: int) -> None:
    if len(data) + len(chunk) > most:
        raise AnswerTooLong(f"its answer is longer than {most} bytes")
    data += chunk
