"""The lease: one process of all that share the folder evicts, for a sweep costs the same however many do it.

It is for economy, not for safety: two holders for a moment would only evict the same files. So a renamed file is enough, where
locks of shared mounts are not. Waiting processes judge its age by their own clocks, as clocks of nodes differ.
"""

import time
from collections.abc import Callable

import msgspec

from starling_engine.kv_offload.secondary.folder.layout import FolderLayout, WriterProcess
from starling_engine.kv_offload.secondary.folder.usage import Amount

DURATION = 15.0
"""Seconds without a renewal after which another process may take the lease."""


class LeaseRecord(msgspec.Struct, frozen=True):
    """Content of the lease's file. `beat` changes with each renewal; a lease without an owner has been released."""

    owner: str = ""
    machine: str = ""
    pid: int = 0
    beat: int = 0
    bytes: int = 0
    objects: int = 0
    known: bool = True

    @property
    def amount(self) -> Amount | None:
        """Amount in the folder; None while the owner has not counted it."""
        return Amount(self.bytes, self.objects) if self.known else None


_decode = msgspec.json.Decoder(LeaseRecord).decode


class FolderLease:
    """The lease as one process sees it; called by one thread."""

    def __init__(self, layout: FolderLayout, clock: Callable[[], float] = time.monotonic) -> None:
        self._layout, self._me, self._clock = layout, layout.process, clock
        self._record: LeaseRecord | None = None
        self._changed_at = 0.0
        self.other: LeaseRecord | None = None
        """Another process's record, as it was last seen."""
        self.is_new = False
        """True when it has just been taken: it counts if it is still this process's at the next look."""

    def acquire_or_renew(self, amount: Amount | None) -> bool:
        """Publishes `amount` where the lease is this process's or free. Returns whether this process may evict. Raises OSError."""
        found = self._look()
        if found is not None and found.owner == self._me.id:
            self._write(self._me, amount, found.beat + 1)
            self.is_new = False
            return True
        self.is_new = found is None or self._is_free(found)
        if self.is_new:
            self._write(self._me, amount if found is None else found.amount, 0)
        return False

    def release(self, amount: Amount | None) -> None:
        """Leaves the amount for the next holder. Raises OSError."""
        found = self._look()
        if found is not None and found.owner == self._me.id:
            self._write(WriterProcess("", "", 0), amount, found.beat + 1)

    def _look(self) -> LeaseRecord | None:
        try:
            found = _decode(self._layout.lease.read_bytes())
        except (FileNotFoundError, msgspec.DecodeError):
            found = None
        if found != self._record:
            self._record, self._changed_at = found, self._clock()
        if found is not None and found.owner != self._me.id:
            self.other = found
        return found

    def _is_free(self, found: LeaseRecord) -> bool:
        gone = not found.owner or WriterProcess(found.owner, found.machine, found.pid).is_gone(self._me)
        return gone or self._clock() - self._changed_at > DURATION

    def _write(self, owner: WriterProcess, amount: Amount | None, beat: int) -> None:
        held = amount or Amount()
        record = LeaseRecord(owner.id, owner.machine, owner.pid, beat, held.bytes, held.objects, amount is not None)
        self._layout.publish(self._layout.lease, msgspec.json.encode(record))
        self._record, self._changed_at = record, self._clock()
