"""Keeps a helper that works, or leaves the store alone until it does: starts it, ends it, tries it, and says so once."""

import logging
import threading
import time

from starling_engine.kv_offload.secondary.breaker import Breaker
from starling_engine.kv_offload.secondary.store.address import StoreAddress
from starling_engine.kv_offload.secondary.store.client import GRACE, Gone, Late, StoreClient

logger = logging.getLogger("starling.store")

FIRST_PAUSE = 0.5
LONGEST_PAUSE = 15.0
SETUP_SECONDS = 20.0
"""The library's own limit for a master that takes connections and does not answer is 90 s."""
STUCK_SECONDS = 60.0
"""The library's own limit for an operation is 30 s: what takes longer than this never ends."""
PROBE = "starling/probe"


class Watch:
    """A thread of its own does what may wait. Threads may call at once, and none of them waits here."""

    def __init__(self, address: StoreAddress) -> None:
        self._address = address
        self._breaker = Breaker(FIRST_PAUSE, LONGEST_PAUSE)
        self._helper: StoreClient | None = None
        self._usable: StoreClient | None = None
        self._imported = threading.Event()
        self._joined = threading.Event()
        """There is a client to use."""
        self._wake = threading.Event()
        self._lock = threading.Lock()
        """Of what is usable."""
        self._closing = False
        self._unusable: str | None = None
        self._thread = threading.Thread(target=self._keep, name="store-watch", daemon=True)
        self._thread.start()

    @property
    def client(self) -> StoreClient | None:
        """None while the store is left alone."""
        return self._usable

    @property
    def cpu_seconds(self) -> float:
        """Processor time of the helper, also while it is of no use yet; begins anew with another one."""
        helper = self._helper
        return 0.0 if helper is None else helper.cpu_seconds

    def unusable(self, timeout: float) -> str | None:
        """Why the library cannot be loaded; None where it can."""
        return self._unusable if self._imported.wait(timeout) else f"not loaded after {timeout:.0f} s"

    def wait(self, timeout: float) -> bool:
        return self._joined.wait(timeout)

    def report(self, client: StoreClient, reason: str) -> None:
        """The store failed somebody. One failure is enough: others would wait as long to learn the same, and so wait no longer."""
        with self._lock:
            if client is not self._usable:
                return  # of an outage that is known
            self._usable = None
        self._joined.clear()
        client.leave()
        self._trip(reason)
        self._wake.set()

    def worked(self, client: StoreClient) -> None:
        """It read or wrote something."""
        seconds = self._breaker.worked() if client is self._usable else None
        if seconds is not None:
            logger.info("the store at %s is in use again, after %.1f s", self._address, seconds)

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        self._thread.join()

    def _trip(self, reason: str) -> None:
        if self._breaker.trip() and not self._closing:
            logger.warning("the store at %s is out of order (%s); serving goes on without it", self._address, reason)

    # ---- in its own thread ----

    def _keep(self) -> None:
        while not self._closing and self._unusable is None:
            self._wake.clear()
            if self._usable is None and not self._breaker.remaining:
                self._try()
            if not self._closing:
                self._wake.wait(self._breaker.remaining)
        helper, self._helper = self._helper, None
        if helper is not None:
            leaves = helper is self._usable  # of a store that is out of order there is no taking leave
            self._usable = None
            helper.close(GRACE if leaves else 0)

    def _try(self) -> None:
        reason = self._why_not()
        if self._closing or self._unusable is not None:
            return
        if reason is not None:
            self._trip(reason)
            return
        self._breaker.close()
        self._usable = self._helper
        self._joined.set()

    def _why_not(self) -> str | None:
        """Gets a helper to work, as far as it can; returns what is still in the way."""
        if self._helper is not None and self._helper.failure is not None:
            self._end_helper()
        if self._helper is None:
            return self._start_helper()
        late = self._helper.oldest_late
        if late is not None:
            if late > STUCK_SECONDS:
                self._end_helper()
            return "a call to it has not ended yet"
        return self._probe(self._helper)

    def _start_helper(self) -> str | None:
        try:
            helper = StoreClient(self._address, self._ended)
        except OSError as error:
            return str(error)
        self._helper = helper
        end = time.monotonic() + SETUP_SECONDS
        while not self._closing and not helper.ready.wait(0.05) and time.monotonic() < end:
            self._note_import(helper)
        self._note_import(helper)
        if helper.ready.is_set() and helper.failure is None:
            return self._probe(helper)
        reason = helper.failure or "it does not answer"
        if not self._closing:
            self._end_helper()
        return reason

    def _note_import(self, helper: StoreClient) -> None:
        if helper.imported.is_set():
            self._unusable = helper.unusable
            self._imported.set()

    def _ended(self) -> None:
        """Called by the helper's thread when it has ended, by itself or not."""
        client = self._usable
        if client is not None and client.failure is not None:
            self.report(client, client.failure)
        self._wake.set()

    def _probe(self, helper: StoreClient) -> str | None:
        try:
            code = helper.call("find", [PROBE], time.monotonic() + self._address.timeout)[0]
        except (Late, Gone) as error:
            return str(error)
        return None if code >= 0 else f"it answers {code}"

    def _end_helper(self) -> None:
        if self._helper is not None:
            self._helper.close(0)
            self._helper = None
