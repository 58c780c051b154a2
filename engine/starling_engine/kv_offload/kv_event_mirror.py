"""What the CPU tier has, told as the device's blocks."""

from collections import Counter
from collections.abc import Iterable

from starling_engine.kv.events import BlockSpan, EventLog


class KVEventMirror:
    """Of one HostIndex. Prefixes that part inside a chunk have chunks with the same first blocks: these are told of once, with the
    first of those chunks, and are there until the last of them goes. So a listener counts nothing: a block is there or not.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._spans: dict[tuple[int, bytes], BlockSpan] = {}
        """Of the chunks that have a slot, the blocks."""
        self._chunks: Counter[tuple[int, bytes]] = Counter()
        """Of the blocks that are told to be there, how many chunks have them."""

    def coming(self, chunk: tuple[int, bytes], span: BlockSpan) -> None:
        """Nothing is said until it is there."""
        self._spans[chunk] = span

    def arrived(self, chunk: tuple[int, bytes]) -> None:
        group, span = chunk[0], self._spans[chunk]
        known = sum(1 for name in span.names if self._chunks[group, name])  # the first ones, as a name is of all before
        self._chunks.update((group, name) for name in span.names)
        self._log.stored(group, span.after(known), "CPU")

    def gone(self, chunk: tuple[int, bytes]) -> None:
        """One that was there."""
        group, names = chunk[0], self._spans.pop(chunk).names
        self._chunks.subtract((group, name) for name in names)
        last = [name for name in names if not self._chunks[group, name]]
        for name in last:
            del self._chunks[group, name]
        self._log.removed(group, last, "CPU")

    def forget(self, chunk: tuple[int, bytes]) -> None:
        """One that has not been told of, or not any more, has its slot no longer."""
        self._spans.pop(chunk, None)

    def cleared(self, chunks: Iterable[tuple[int, bytes]]) -> None:
        """These were there, and none is any more."""
        for chunk in chunks:
            self.gone(chunk)
        self._log.emptied()

    def check_integrity(self, there: set[tuple[int, bytes]]) -> None:
        """Asserts that these chunks are told of, and no others."""
        assert there <= self._spans.keys()
        assert self._chunks == Counter((chunk[0], name) for chunk in there for name in self._spans[chunk].names)
