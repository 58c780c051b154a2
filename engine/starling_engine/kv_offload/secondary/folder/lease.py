"""Who evicts: one process of all that share the folder, for the scan costs the same however many do it.

A lease is for economy, not for safety: two holders for a moment would only evict the same files. So a renamed file is enough, where
locks of shared mounts are not. Its age is judged by who waits, by its own clock: nodes' clocks differ.
"""

import time
from collections.abc import Callable

import msgspec

from starling_engine.kv_offload.secondary.folder.layout import FolderLayout, WriterProcess
from starling_engine.kv_offload.secondary.folder.usage import Amount

DURATION = 15.0
"""Seconds without a renewal after which another may take it."""


class LeaseRecord(msgspec.Struct, frozen=True):
    """The lease's file. `beat` changes with each renewal; no owner is a lease that was given back."""

    owner: str = ""
    machine: str = ""
    pid: int = 0
    beat: int = 0
    bytes: int = 0
    objects: int = 0
    known: bool = True

    @property
    def amount(self) -> Amount | None:
        """None while the owner has not counted what it found: the folder may hold anything."""
        return Amount(self.bytes, self.objects) if self.known else None


_decode = msgspec.json.Decoder(LeaseRecord).decode


class FolderLease:
    """One process's view of it; called by one thread."""

    def __init__(self, layout: FolderLayout, clock: Callable[[], float] = time.monotonic) -> None:
        self._layout, self._me, self._clock = layout, layout.process, clock
        self._seen_at = 0.0
        self._term: LeaseRecord | None = None
        self.heard: LeaseRecord | None = None
        """Another's, as it was last seen."""
        self.is_new = False
        """It has just been taken, and counts when it is still ours at the next look."""

    def hold(self, amount: Amount | None) -> bool:
        """Takes or renews it, publishing `amount`. Whether this process is to evict. Raises OSError."""
        found = self._look()
        if found is not None and found.owner == self._me.id:
            self._write(amount, found.beat + 1)
            self.is_new = False
            return True
        self.is_new = found is None or self._is_free(found)
        if self.is_new:
            self._write(amount if found is None else found.amount, 0)
        return False

    def give_back(self, amount: Amount | None) -> None:
        """Leaves the count for whoever comes next. Raises OSError."""
        found = self._look()
        if found is not None and found.owner == self._me.id:
            self._publish("", "", 0, amount, found.beat + 1)

    def _look(self) -> LeaseRecord | None:
        try:
            found = _decode(self._layout.lease.read_bytes())
        except (FileNotFoundError, msgspec.DecodeError):
            found = None
        if found != self._term:
            self._term, self._seen_at = found, self._clock()
        if found is not None and found.owner != self._me.id:
            self.heard = found
        return found

    def _is_free(self, found: LeaseRecord) -> bool:
        gone = not found.owner or WriterProcess(found.owner, found.machine, found.pid).is_gone(self._me)
        return gone or self._clock() - self._seen_at > DURATION

    def _write(self, amount: Amount | None, beat: int) -> None:
        self._publish(self._me.id, self._me.machine, self._me.pid, amount, beat)

    def _publish(self, owner: str, machine: str, pid: int, amount: Amount | None, beat: int) -> None:
        known = amount or Amount()
        term = LeaseRecord(owner, machine, pid, beat, known.bytes, known.objects, amount is not None)
        self._layout.publish(self._layout.lease, msgspec.json.encode(term))
        self._term, self._seen_at = term, self._clock()
