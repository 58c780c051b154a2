"""Finds the event by which a server ends a stream with an error of its own: its status was 200 before that was known."""

import re

MOST_KEPT = 1 << 16
"""Bytes of an event that are kept for the rest of it: an error's are fewer, and another one's are no matter."""
_ERROR = re.compile(
    rb'^(?:event: (?:error|response\.failed)\ndata: |data: \{"error":)'
    rb'[^\n]*"(?:type|code)":"(?:server_error|api_error|overloaded_error)"',
    re.MULTILINE,
)
"""Events of agents, whose JSON has no spaces. In a text of theirs the quotes would stand behind backslashes."""


class StreamErrors:
    """Belongs to one stream, whose pieces may end anywhere."""

    def __init__(self) -> None:
        self._begun = b""
        """The beginning of an event that has not come whole."""

    def take(self, piece: bytes) -> bool:
        """Says whether an error has come with this piece. What the request itself has wrong is none."""
        text = self._begun + piece
        self._begun = text[text.rfind(b"\n\n") + 2 if b"\n\n" in text else 0 :][:MOST_KEPT]
        if _ERROR.search(text) is None:
            return False
        self._begun = b""
        return True
