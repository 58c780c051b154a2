"""Supervision of the helper process: it is started, tried and ended, and left alone while the store is out of order."""

import threading
import time

from starling_engine.kv_offload.secondary.circuit_breaker import CircuitBreaker
from starling_engine.kv_offload.secondary.store.address import StoreAddress
from starling_engine.kv_offload.secondary.store.client import CallLate, HelperGone, StoreClient


class HelperSupervisor:
    """A thread does all that may wait; no other thread waits here. Several threads call it."""

    def __init__(self, address: StoreAddress) -> None:
        self._address = address
        self._breaker = CircuitBreaker(0.5, 15.0, name=f"the store at {address}")
        self._helper: StoreClient | None = None
        self._usable: StoreClient | None = None
        self._imported = threading.Event()
        self._joined = threading.Event()
        """Set while there is a client to use."""
        self._wake = threading.Event()
        self._lock = threading.Lock()
        """Guards `_usable`."""
        self._closing = False
        self._unusable: str | None = None
        self._thread = threading.Thread(target=self._run, name="store-supervisor", daemon=True)
        self._thread.start()

    @property
    def client(self) -> StoreClient | None:
        """The client to use; None while the store is left alone."""
        return self._usable

    @property
    def cpu_seconds(self) -> float:
        """Processor time of the helper, also before it is usable; starts again from 0 with another one."""
        helper = self._helper
        return 0.0 if helper is None else helper.cpu_seconds

    def unusable(self, timeout: float) -> str | None:
        """Returns why the library cannot be loaded; None where it can."""
        return self._unusable if self._imported.wait(timeout) else f"not loaded after {timeout:.0f} s"

    def wait(self, timeout: float) -> bool:
        return self._joined.wait(timeout)

    def report(self, client: StoreClient, reason: str) -> None:
        """Reports a failure. One is enough: other callers, who would wait as long to learn the same, wait no longer."""
        with self._lock:
            if client is not self._usable:
                return  # of an outage that is known
            self._usable = None
        self._joined.clear()
        client.abandon_calls()
        self._trip(reason)
        self._wake.set()

    def worked(self, client: StoreClient) -> None:
        """Reports that something was read or written."""
        if client is self._usable:
            self._breaker.worked()

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        self._thread.join()

    def _trip(self, reason: str) -> None:
        if not self._closing:
            self._breaker.trip(reason)

    # ---- in its own thread ----

    def _run(self) -> None:
        while not self._closing and self._unusable is None:
            self._wake.clear()
            if self._usable is None and not self._breaker.remaining:
                self._try()
            if not self._closing:
                self._wake.wait(None if self._usable is not None else self._breaker.remaining)
        helper, self._helper = self._helper, None
        if helper is not None:
            usable, self._usable = helper is self._usable, None
            helper.close(grace=4.0 if usable else 0.0)  # it leaves the store within 3 s, unless that is out of order

    def _try(self) -> None:
        reason = self._make_usable()
        if self._closing or self._unusable is not None:
            return
        if reason is not None:
            self._trip(reason)
            return
        self._usable = self._helper
        self._joined.set()

    def _make_usable(self, stuck_after: float = 60.0) -> str | None:
        """Gets a helper to work, as far as possible. Returns what is still in the way.

        The library gives an operation up after 30 s: one that takes longer than `stuck_after` never ends.
        """
        if self._helper is not None and self._helper.failure is not None:
            self._end_helper()
        if self._helper is None:
            return self._start_helper()
        late = self._helper.oldest_late
        if late is not None:
            if late > stuck_after:
                self._end_helper()
            return "a call to it has not ended yet"
        return self._probe(self._helper)

    def _start_helper(self, timeout: float = 20.0) -> str | None:
        """Starts a helper. By itself, the library would wait 90 s for a master that hangs."""
        try:
            helper = StoreClient(self._address, self._on_helper_end)
        except OSError as error:
            return str(error)
        self._helper = helper
        end = time.monotonic() + timeout
        while not self._closing and not helper.joined.wait(0.05) and time.monotonic() < end:
            self._note_import(helper)
        self._note_import(helper)
        if helper.joined.is_set() and helper.failure is None:
            return self._probe(helper)
        reason = helper.failure or "it does not answer"
        if not self._closing:
            self._end_helper()
        return reason

    def _note_import(self, helper: StoreClient) -> None:
        if helper.imported.is_set():
            self._unusable = helper.unusable
            self._imported.set()

    def _on_helper_end(self) -> None:
        client = self._usable
        if client is not None and client.failure is not None:
            self.report(client, client.failure)
        self._wake.set()

    def _probe(self, helper: StoreClient) -> str | None:
        try:
            code = helper.call("find", ["starling/probe"], time.monotonic() + self._address.timeout)[0]
        except (CallLate, HelperGone) as error:
            return str(error)
        return None if code >= 0 else f"it answers {code}"

    def _end_helper(self) -> None:
        if self._helper is not None:
            self._helper.close(grace=0.0)
            self._helper = None
