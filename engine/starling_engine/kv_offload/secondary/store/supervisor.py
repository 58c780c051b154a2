"""Supervision of the helper process: it is started, tried and ended, and left alone while the store is out of order."""

import threading
import time

from starling_engine.kv_offload.secondary.circuit_breaker import CircuitBreaker
from starling_engine.kv_offload.secondary.store.address import StoreAddress
from starling_engine.kv_offload.secondary.store.client import CallFailed, StoreClient


class HelperSupervisor:
    """A thread does all that may wait; no other thread waits here. Several threads call it."""

    def __init__(self, address: StoreAddress) -> None:
        self._address = address
        self._breaker = CircuitBreaker(0.5, 15.0, name=f"the store at {address}")
        self._helper: StoreClient | None = None
        self._works = threading.Event()
        """Set while the helper is to be used."""
        self._wake = threading.Event()
        self._lock = threading.Lock()
        """Guards the breaker, and that only one report ends the helper's use."""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="store-supervisor", daemon=True)
        self._thread.start()

    @property
    def client(self) -> StoreClient | None:
        """The client to use; None while the store is left alone."""
        return self._helper if self._works.is_set() else None

    @property
    def cpu_seconds(self) -> float:
        """Processor time of the helper, also before it is usable; starts again from 0 with another one."""
        helper = self._helper
        return 0.0 if helper is None else helper.cpu_seconds

    def wait(self, timeout: float) -> bool:
        return self._works.wait(timeout)

    def report(self, client: StoreClient, reason: str) -> None:
        """Reports a failure. One is enough: other callers, who would wait as long to learn the same, wait no longer."""
        with self._lock:
            if client is not self.client:
                return  # of an outage that is known
            self._works.clear()
            self._breaker.trip(reason)
        client.abandon_calls()
        self._wake.set()

    def worked(self, client: StoreClient) -> None:
        """Reports that something was read or written."""
        with self._lock:
            if client is self.client:
                self._breaker.worked()

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        while self._thread.is_alive():
            helper = self._helper
            if helper is not None and not self._works.is_set():
                helper.abandon_calls()  # the thread's own
            self._thread.join(0.1)

    # ---- in its own thread ----

    def _run(self) -> None:
        while not self._closing:
            if self.client is None and not self._breaker.remaining:
                self._try()
            self._wake.wait(self._breaker.remaining if self.client is None else None)
            self._wake.clear()
        grace = 4.0 if self._works.is_set() else 0.0  # it takes seconds to leave a store that is out of order
        self._works.clear()
        self._end_helper(grace)

    def _try(self) -> None:
        try:
            self._check(self._running_helper())
        except (OSError, CallFailed) as error:
            if not self._closing:
                self._breaker.trip(str(error))
        else:
            self._works.set()

    def _running_helper(self, stuck_after: float = 60.0) -> StoreClient:
        """Returns the helper, which is another one where the last has ended or is stuck. Raises CallFailed, OSError.

        The library gives an operation up after 30 s: one that takes longer than `stuck_after` never ends.
        """
        helper = self._helper
        if helper is not None and (helper.failure is not None or helper.oldest_late > stuck_after):
            self._end_helper()
        if self._helper is None:
            self._helper = StoreClient(self._address, self.report)
        if self._helper.oldest_late:
            raise CallFailed("a call to it has not ended yet")
        return self._helper

    def _check(self, helper: StoreClient, join_seconds: float = 20.0) -> None:
        """Raises CallFailed where the store does not work."""
        helper.call("join", ["starling/probe"], time.monotonic() + join_seconds)
        code = helper.call("find", ["starling/probe"], time.monotonic() + self._address.timeout)[0]
        if code < 0:
            raise CallFailed(f"it answers {code}")

    def _end_helper(self, grace: float = 0.0) -> None:
        if self._helper is not None:
            self._helper.close(grace)
            self._helper = None
