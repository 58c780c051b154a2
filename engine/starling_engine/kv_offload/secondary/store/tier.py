"""A store over the network as a tier: Mooncake Store (https://kvcache-ai.github.io/Mooncake), which a fleet of engines shares.

Whatever the store does, a call here takes no longer than its time limit, and an outage costs one. The store's library runs in a
process of its own (`helper`), so that it neither hangs nor crashes the engine.
"""

import contextlib
import logging
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256

import numpy as np
from xxhash import xxh3_64_intdigest

from starling_engine.errors import ConfigError
from starling_engine.kv_offload.log_throttle import LogThrottle
from starling_engine.kv_offload.secondary.base import ObjectKey, ObjectMissing, TierCounters, TierError
from starling_engine.kv_offload.secondary.circuit_breaker import CircuitBreaker
from starling_engine.kv_offload.secondary.store.address import StoreAddress, parse_address
from starling_engine.kv_offload.secondary.store.client import CallFailed, NoSpace, StoreClient
from starling_engine.kv_offload.secondary.store.helper import Code
from starling_engine.kv_offload.secondary.store.supervisor import HelperSupervisor

logger = logging.getLogger("starling.tiers")

HEADER = struct.Struct("<4sHHIQ12s")
"""Magic, version, zero, bytes of the payload, its XXH3, and the first 12 bytes of the key's SHA-256."""


def open_store(url: str, fingerprint: bytes) -> "StoreTier":
    """Opens the store of that URL (`parse_address`) for objects that are valid under `fingerprint`.

    A store that is not there yet is no error: the tier joins it when it comes. Raises ConfigError for a URL that cannot be one, or
    where the store's library cannot be loaded.
    """
    address = parse_address(url)
    check_library()
    return StoreTier(address, fingerprint)


def check_library() -> None:
    """Loads the store's library in a process of its own, which ends then. Raises ConfigError where that fails."""
    trial = [sys.executable, "-c", "import mooncake.store"]
    try:
        subprocess.run(trial, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(getattr(error, "stderr", None) or error).strip().rpartition("\n")[2]
        libraries = "libibverbs1 librdmacm1 libnuma1 liburing2 libcurl4"
        raise ConfigError(
            f"Mooncake's client cannot be loaded ({reason}); it takes the extra starling[store], and Debian's {libraries}",
            "kv_store",
        ) from None


class StoreTier:
    """A `SecondaryTier`. Each rank has one."""

    name = "store"

    def __init__(self, address: StoreAddress, fingerprint: bytes) -> None:
        self.counters = TierCounters()
        self._address = address
        self._fingerprint = fingerprint
        self._lock = threading.Lock()
        """Guards the counters."""
        self._room = StoreRoom(address)
        self._supervisor = HelperSupervisor(address)

    @property
    def cpu_elsewhere(self) -> float:
        return self._supervisor.cpu_seconds

    def wait(self, timeout: float) -> bool:
        """Waits until the store is in use. Returns whether it is."""
        return self._supervisor.wait(timeout)

    def close(self) -> None:
        self._supervisor.close()

    # ---- operations ----

    def lookup(self, keys: Sequence[ObjectKey], packet: int = 256) -> list[bool]:
        names, deadline = [store_key(self._fingerprint, key) for key in keys], self._deadline()
        found: list[bool] = []
        with self._use() as client:
            for start in range(0, len(names), packet):
                codes = client.call("find", names[start : start + packet], deadline)
                if min(codes) < 0:
                    raise self._failed(client, "find", min(codes))
                found += [code == 1 for code in codes]
        return found

    def read(self, key: ObjectKey, into: memoryview) -> None:
        name, deadline = store_key(self._fingerprint, key), self._deadline()
        with self._use() as client, client.reserve(HEADER.size + into.nbytes, deadline) as value:
            code = client.call("get", [name], deadline, value)[0]
            if code == Code.NOT_FOUND:
                raise ObjectMissing(name)
            if code < 0 and code != Code.TOO_LARGE:
                raise self._failed(client, "get", code)
            self._supervisor.worked(client)
            if code < 0 or not is_whole(name, value.view[:code], into.nbytes):
                self._drop(client, name)
            _copy(value.view[HEADER.size :], into)

    def write(self, key: ObjectKey, data: memoryview) -> None:
        name, deadline = store_key(self._fingerprint, key), self._deadline()
        if not self._room.is_expected:
            self._count("full")
            raise TierError("the store is full")
        with self._use() as client, client.reserve(HEADER.size + data.nbytes, deadline) as value:
            value.view[: HEADER.size] = seal(name, data)
            _copy(data, value.view[HEADER.size :])
            code = client.call("put", [name], deadline, value)[0]
            if code < 0:
                raise self._failed(client, "put", code)
            self._supervisor.worked(client)
        self._room.was_there()

    # ---- failures ----

    @contextmanager
    def _use(self) -> Iterator[StoreClient]:
        """Lends the client, if there is one to use. All that fails inside is counted, and comes out as TierError."""
        client = self._supervisor.client
        if client is None:
            self._count("refused")
            raise TierError("the store is out of order, and is left alone for a while")
        try:
            yield client
        except CallFailed as error:
            self._count("errors")
            self._supervisor.report(client, str(error))
            raise TierError(str(error)) from None
        except NoSpace:
            self._count("errors")
            raise

    def _failed(self, client: StoreClient, what: str, code: int) -> TierError:
        self._count("full" if code == Code.NO_ROOM else "errors")
        if code == Code.MASTER_UNREACHABLE:
            self._supervisor.report(client, "its master cannot be reached")
        elif code == Code.NO_ROOM:
            self._room.was_missing()
        return TierError(f"{what}: the store answers {code}")

    def _drop(self, client: StoreClient, name: str) -> None:
        """Removes a damaged or foreign value, so that a whole one can be written. Raises ObjectMissing."""
        self._count("corrupt")
        with contextlib.suppress(CallFailed):
            client.call("drop", [name], self._deadline())
        raise ObjectMissing(name)

    def _deadline(self) -> float:
        return time.monotonic() + self._address.timeout

    def _count(self, counter: str) -> None:
        with self._lock:
            setattr(self.counters, counter, getattr(self.counters, counter) + 1)


class StoreRoom:
    """Room in the store, which a full store makes in a while; meanwhile it can be read from. Several threads call it."""

    def __init__(self, address: object, clock: Callable[[], float] = time.monotonic) -> None:
        self._address, self._clock = address, clock
        self._breaker = CircuitBreaker(0.25, 8.0, clock)
        self._lock, self._throttle = threading.Lock(), LogThrottle()

    @property
    def is_expected(self) -> bool:
        """True when a write is worth trying."""
        return not self._breaker.remaining

    def was_missing(self) -> None:
        """Reports that a write was refused for lack of room."""
        self._breaker.trip()
        with self._lock:
            is_due = self._throttle.is_due(self._clock())
        if is_due:
            logger.warning("the store at %s has no room; what it does not take is kept here only", self._address)

    def was_there(self) -> None:
        """Reports that a write was taken."""
        self._breaker.worked()


# ---- values in the store ----


def store_key(fingerprint: bytes, key: ObjectKey) -> str:
    """Returns starling/FINGERPRINT/GROUP/PART/NAME, all in hexadecimal digits; a part is its four bounds."""
    part = ".".join(f"{bound:x}" for bound in key.part)
    return f"starling/{fingerprint.hex()}/{key.group:x}/{part}/{key.name.hex()}"


def seal(key: str, payload: memoryview) -> bytes:
    """Returns the header that goes before the payload."""
    return HEADER.pack(b"STKV", 2, 0, payload.nbytes, xxh3_64_intdigest(payload), sha256(key.encode()).digest()[:12])


def is_whole(key: str, value: memoryview, payload_bytes: int) -> bool:
    """Returns whether `value`, header and payload, is what `seal` was called for: this key, these bytes."""
    return value.nbytes == HEADER.size + payload_bytes and bytes(value[: HEADER.size]) == seal(key, value[HEADER.size :])


def _copy(source: memoryview, target: memoryview) -> None:
    """Copies without the interpreter's lock: others may run Python meanwhile, such as the thread that makes steps."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
