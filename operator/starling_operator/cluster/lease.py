"""The Lease: of all operators that watch, only its holder writes.

Only local clocks decide on expiry. A candidate waits until it has seen the Lease unchanged for its whole duration. The holder stops
writing MARGIN before others may take over, counted from when its last renewal was sent.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from starling_operator.cluster.kinds import LEASE
from starling_operator.cluster.kube import Kube, KubeError
from starling_operator.plan.observed import Manifest

DURATION, RENEW, MARGIN = 15.0, 2.0, 5.0
"""Values of Kubernetes' own controllers: 15 s of Lease, given up after 10 s without a renewal, one tried every 2 s."""
REQUEST_SECONDS = 5.0
"""Seconds for one request. An API server under load may need longer than the time between two tries."""
log = logging.getLogger(__name__)


class LeaseLost(Exception):
    """The Lease is lost: another operator may act, and this one must not."""


class Lease:
    """One holder at a time. Every write calls `fence` first."""

    def __init__(self, namespace: str, name: str, identity: str) -> None:
        self._namespace, self._name, self._identity = namespace, name, identity
        self._until = 0.0
        self._held: Manifest | None = None
        self._watched: tuple[str, float] = ("", 0.0)

    @property
    def held(self) -> bool:
        return time.monotonic() < self._until

    def fence(self) -> float:
        """Returns the seconds for which writing is allowed. Raises LeaseLost when it is not."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise LeaseLost(f"Lease {self._namespace}/{self._name} is not held by {self._identity}")
        return left

    async def acquire(self, kube: Kube) -> None:
        """Returns when this operator holds the Lease."""
        while True:
            if await self._try(kube):
                break
            await asyncio.sleep(RENEW * random.uniform(0.4, 0.8))
        log.info("acquired the Lease %s/%s as %s", self._namespace, self._name, self._identity)

    async def hold(self, kube: Kube, alive: Callable[[], bool]) -> None:
        """Renews the Lease while the rest of the process is `alive`. Raises LeaseLost when renewals have failed for too long."""
        while True:
            await asyncio.sleep(RENEW if self._until - time.monotonic() > DURATION / 3 else 0.5)
            self.fence()
            if alive():
                await self._renew(kube)

    async def release(self, kube: Kube) -> None:
        """Frees the Lease, so that another operator takes over at once."""
        if self._held is None or self._held.get("spec", {}).get("holderIdentity") != self._identity:
            return
        self._until = 0.0
        try:
            await self._free(kube)
        except (KubeError, LeaseLost) as error:
            log.warning("the Lease was not released, others wait until it expires: %s", error)

    async def _free(self, kube: Kube) -> None:
        for last in (False, True):
            assert self._held is not None
            try:
                await self._write(kube, "PUT", {**self._held["spec"], "holderIdentity": "", "leaseDurationSeconds": 1})
                return
            except KubeError as error:
                if last or error.status != 409:
                    raise
                await self._read_again(kube)  # a renewal that was cut short may have arrived

    async def _renew(self, kube: Kube) -> None:
        assert self._held is not None
        sent = time.monotonic()
        try:
            self._held = await self._write(kube, "PUT", {**self._held["spec"], "renewTime": _now()})
        except KubeError as error:
            log.warning("the Lease was not renewed: %s", error)
            if error.status in (404, 409):
                await self._read_again(kube)
        else:
            self._until = sent + DURATION - MARGIN

    async def _read_again(self, kube: Kube) -> None:
        """Reads the Lease after a conflict: a renewal whose answer was lost causes one. Raises LeaseLost if another holds it."""
        found = await self._read(kube)
        if found is None or found.get("spec", {}).get("holderIdentity") != self._identity:
            self._until = 0.0
            raise LeaseLost("the Lease was taken or deleted")
        self._held = found

    async def _try(self, kube: Kube) -> bool:
        sent = time.monotonic()
        try:
            self._held = await self._read(kube)
            if self._held is not None and not self._is_free(self._held):
                return False
            self._held = await self._write(kube, "POST" if self._held is None else "PUT", self._spec())
        except KubeError as error:
            if error.status != 409:
                log.warning("the Lease %s/%s cannot be acquired: %s", self._namespace, self._name, error)
            return False
        self._until = sent + DURATION - MARGIN
        return True

    def _is_free(self, lease: Manifest) -> bool:
        spec, version = lease.get("spec", {}), lease["metadata"]["resourceVersion"]
        if not spec.get("holderIdentity"):
            return True
        if self._watched[0] != version:
            self._watched = (version, time.monotonic())
        return time.monotonic() - self._watched[1] >= float(spec.get("leaseDurationSeconds", DURATION))

    def _spec(self) -> Manifest:
        spec = {} if self._held is None else self._held.get("spec", {})
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(DURATION),
            "acquireTime": _now(),
            "renewTime": _now(),
            "leaseTransitions": spec.get("leaseTransitions", -1) + 1,
        }

    async def _read(self, kube: Kube) -> Manifest | None:
        try:
            return await kube.request("GET", LEASE.path(self._namespace, self._name), seconds=REQUEST_SECONDS)
        except KubeError as error:
            if error.status == 404:
                return None
            raise

    async def _write(self, kube: Kube, method: str, spec: Manifest) -> Manifest:
        metadata = {"name": self._name, "namespace": self._namespace}
        if method == "PUT":
            assert self._held is not None
            metadata["resourceVersion"] = self._held["metadata"]["resourceVersion"]
        body = {"apiVersion": LEASE.api_version, "kind": LEASE.name, "metadata": metadata, "spec": spec}
        path = LEASE.path(self._namespace, self._name if method == "PUT" else "")
        return await kube.request(method, path, None, body, seconds=REQUEST_SECONDS)


async def run_in_thread(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs `work` in a thread with a loop of its own, and raises its failure. When cancelled it cancels `work` and waits."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(work())
    thread = asyncio.ensure_future(asyncio.to_thread(_run_loop, loop, task))
    try:
        await asyncio.shield(thread)
    except asyncio.CancelledError:
        with suppress(RuntimeError):  # the loop is closed: it ended just now
            loop.call_soon_threadsafe(task.cancel)
        await thread
        raise
    task.result()


def _run_loop(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    """Runs the loop until the task ends, which keeps its outcome."""
    asyncio.set_event_loop(loop)
    loop.run_until_complete(asyncio.wait([task]))
    loop.close()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
