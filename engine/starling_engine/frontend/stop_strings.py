"""Finds constant texts in a text that comes in pieces: stop strings, and markers of formats."""

from collections.abc import Sequence


def first_stop(text: str, stops: Sequence[str], after: int = 0) -> tuple[int, str] | None:
    """Returns the start of the stop string that is complete first, and the string; the longest if several end at once.

    Those that end within the first `after` characters were looked for before.
    """
    starts = [(text.find(stop, max(0, after - len(stop) + 1)), stop) for stop in stops]
    found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
    return min(found)[1:] if found else None


def longest_beginning(text: str, stops: Sequence[str]) -> int:
    """Returns the length of the longest end of `text` that begins, and does not complete, a stop string."""
    longest = 0
    for stop in stops:
        start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while start >= 0 and not stop.startswith(text[start:]):
            start = text.find(stop[0], start + 1)
        if start >= 0:
            longest = max(longest, len(text) - start)
    return longest
