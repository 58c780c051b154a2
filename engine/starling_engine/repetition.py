"""Outputs that repeat themselves: finds that the last tokens are one pattern, several times in a row."""

from collections import deque
from collections.abc import Iterable

from starling_engine.params import RepetitionDetectionParams


class RepetitionDetector:
    """Follows the output of one request. Its state depends on the output's tokens alone, however they came.

    A pattern of n tokens repeats m times when the last n * (m - 1) tokens each equal the one n before. So the detector counts down
    from that number, for each distance.
    """

    __slots__ = ("_length", "_longest", "_missing", "_places", "_recent", "_repeats", "_shortest")

    def __init__(self, wanted: RepetitionDetectionParams, output: Iterable[int]) -> None:
        self._shortest = max(1, wanted.min_pattern_size)
        self._longest = wanted.max_pattern_size
        self._repeats = wanted.min_count - 1
        self._length = 0
        self._recent: deque[int] = deque()
        """The last tokens, of which a pattern may be made."""
        self._places: dict[int, deque[int]] = {}
        """Places of the recent tokens in the output."""
        self._missing: dict[int, int] = {}
        """Distances at which the last token equals the one before: how many more tokens have to."""
        for token in output:
            self.advance(token)

    def advance(self, token: int) -> bool:
        """Takes the output's next token; returns True if the output ends with a repetition. Takes O(max_pattern_size) at most."""
        places = self._places.setdefault(token, deque())
        distances = [self._length - place for place in places if self._length - place >= self._shortest]
        before, repeats = self._missing, self._repeats
        self._missing = {distance: before.get(distance, distance * repeats) - 1 for distance in distances}
        places.append(self._length)
        self._remember(token)
        return min(self._missing.values(), default=1) <= 0

    def _remember(self, token: int) -> None:
        """Adds a token to the recent ones, and forgets the one that is now too far before."""
        self._length += 1
        self._recent.append(token)
        if len(self._recent) <= self._longest:
            return
        oldest = self._recent.popleft()
        self._places[oldest].popleft()
        if not self._places[oldest]:
            del self._places[oldest]
