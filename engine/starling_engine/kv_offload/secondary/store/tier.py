"""The tier that engines call. Whatever the store does, a call here takes no longer than its time limit, and an outage costs one."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from starling_engine.errors import ConfigError
from starling_engine.kv_offload.secondary.base import ObjectKey, ObjectMissing, TierCounters, TierError
from starling_engine.kv_offload.secondary.store.address import StoreAddress, parse_address
from starling_engine.kv_offload.secondary.store.client import Gone, Late, NoSpace, StoreClient
from starling_engine.kv_offload.secondary.store.envelope import HEADER, is_whole, seal, store_key
from starling_engine.kv_offload.secondary.store.messages import MASTER_UNREACHABLE, NO_ROOM, NOT_FOUND, TOO_LARGE
from starling_engine.kv_offload.secondary.store.room import Room
from starling_engine.kv_offload.secondary.store.watch import Watch

IMPORT_SECONDS = 30.0
FIND_KEYS = 256
"""Keys asked for in one packet."""
LIBRARIES = "libibverbs1 librdmacm1 libnuma1 liburing2 libcurl4"


def open_store(url: str, fingerprint: bytes) -> "StoreTier":
    """Opens the store of that URL (`address.FORM`) for objects that are valid under `fingerprint`.

    A store that is not there yet is no error: the tier joins it when it comes. Raises ConfigError for a URL that cannot be one, or
    where the store's library is not installed.
    """
    tier = StoreTier(parse_address(url), fingerprint)
    try:
        tier.check_library()
    except ConfigError:
        tier.close()
        raise
    return tier


class StoreTier:
    """A `SecondaryTier`. Each rank has one."""

    name = "store"

    def __init__(self, address: StoreAddress, fingerprint: bytes) -> None:
        self.counters = TierCounters()
        self._address = address
        self._fingerprint = fingerprint
        self._lock = threading.Lock()
        """Of the counters."""
        self._room = Room(address)
        self._watch = Watch(address)

    def check_library(self) -> None:
        """Raises ConfigError where the store's library cannot be loaded."""
        reason = self._watch.unusable(IMPORT_SECONDS)
        if reason is not None:
            raise ConfigError(
                f"Mooncake's client cannot be loaded ({reason}); it takes the extra starling[store], and Debian's {LIBRARIES}",
                "kv_store",
            )

    @property
    def cpu_elsewhere(self) -> float:
        return self._watch.cpu_seconds

    def wait(self, timeout: float) -> bool:
        """Whether the store is in use, now or within so many seconds."""
        return self._watch.wait(timeout)

    def close(self) -> None:
        self._watch.close()

    # ---- operations ----

    def find(self, keys: Sequence[ObjectKey]) -> list[bool]:
        names = [store_key(self._fingerprint, key) for key in keys]
        found: list[bool] = []
        with self._use() as client:
            for start in range(0, len(names), FIND_KEYS):
                codes = client.call("find", names[start : start + FIND_KEYS], self._deadline())
                if min(codes) < 0:
                    raise self._failed(client, "find", min(codes))
                found += [code == 1 for code in codes]
        return found

    def read(self, key: ObjectKey, into: memoryview) -> None:
        name, deadline = store_key(self._fingerprint, key), self._deadline()
        with self._use() as client, client.space(HEADER.size + into.nbytes, deadline) as place:
            code = client.call("get", [name], deadline, place)[0]
            if code == NOT_FOUND:
                raise ObjectMissing(name)
            if code < 0 and code != TOO_LARGE:
                raise self._failed(client, "get", code)
            self._watch.worked(client)
            if code < 0 or not is_whole(name, place.view[:code], into.nbytes):
                self._drop(client, name)
            _copy(place.view[HEADER.size :], into)

    def write(self, key: ObjectKey, data: memoryview) -> None:
        name, deadline = store_key(self._fingerprint, key), self._deadline()
        if not self._room.is_expected:
            self._count("full")
            raise TierError("the store is full")
        with self._use() as client, client.space(HEADER.size + data.nbytes, deadline) as place:
            place.view[: HEADER.size] = seal(name, data)
            _copy(data, place.view[HEADER.size :])
            code = client.call("put", [name], deadline, place)[0]
            if code < 0:
                raise self._failed(client, "put", code)
            self._watch.worked(client)
        self._room.was_there()

    # ---- when it goes wrong ----

    @contextmanager
    def _use(self) -> Iterator[StoreClient]:
        """The client while there is one to use. Everything that fails inside comes out as FarError, and is counted."""
        client = self._watch.client
        if client is None:
            self._count("refused")
            raise TierError("the store is out of order, and is left alone for a while")
        try:
            yield client
        except (Late, Gone) as error:
            self._count("errors")
            self._watch.report(client, str(error))
            raise TierError(str(error)) from None
        except NoSpace as error:
            self._count("errors")
            raise TierError(str(error)) from None

    def _failed(self, client: StoreClient, what: str, code: int) -> TierError:
        self._count("full" if code == NO_ROOM else "errors")
        if code == MASTER_UNREACHABLE:
            self._watch.report(client, "its master cannot be reached")
        elif code == NO_ROOM:
            self._room.was_missing()
        return TierError(f"{what}: the store answers {code}")

    def _drop(self, client: StoreClient, name: str) -> None:
        """What is damaged or foreign makes way for what will be written."""
        self._count("corrupt")
        with contextlib.suppress(Late, Gone):
            client.call("drop", [name], self._deadline())
        raise ObjectMissing(name)

    def _deadline(self) -> float:
        return time.monotonic() + self._address.timeout

    def _count(self, counter: str) -> None:
        with self._lock:
            setattr(self.counters, counter, getattr(self.counters, counter) + 1)


def _copy(what: memoryview, to: memoryview) -> None:
    """As a slice's assignment does, but others may run Python meanwhile: the thread that makes steps, for one."""
    np.copyto(np.frombuffer(to, np.uint8), np.frombuffer(what, np.uint8))
