"""Observes, plans, carries out and displays, once for each thing that happened, until a signal comes."""

import asyncio
import contextlib
import dataclasses
import signal
from dataclasses import dataclass
from pathlib import Path

from starling_agent.contract.listening import authority
from starling_operator.plan.decision import Decision
from starling_operator.plan.plan import plan

from starling_cli.local.display import StatusDisplay
from starling_cli.local.machine import Machine, ManifestObjects
from starling_cli.local.machine_folders import MachineFolders
from starling_cli.local.proxy import LocalProxy
from starling_cli.local.run_folder import run_folder
from starling_cli.local.service_file import LoadedService, WatchedFile, load_service
from starling_cli.local.sources import PathMap
from starling_cli.local.status import local_status

RESYNC_SECONDS = 5.0
"""Longest time between two plans: an agent that falls silent causes no event."""
TICK_SECONDS = 0.5


@dataclass(frozen=True)
class UpOptions:
    """Options of `starling up`.

    weights   folder of downloads
    logs      folder of the agents' logs, which stays; None: they are removed with the run
    """

    file: Path
    name: str | None
    host: str
    port: int
    maps: tuple[PathMap, ...]
    weights: Path
    logs: Path | None = None


async def run(options: UpOptions, loaded: LoadedService, display: StatusDisplay) -> int:
    """Runs the service of the file until a signal, and returns the exit status. Raises OSError where the port is taken."""
    with run_folder() as folder:
        logs = options.logs or folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        options.weights.mkdir(parents=True, exist_ok=True)
        up = LocalService(options, MachineFolders(folder, logs, options.weights, options.maps, options.file.name), loaded, display)
        try:
            await up.listen()
            await up.run_until_signal()
            return await up.drain()
        finally:
            await up.close()


class LocalService:
    """One service that runs on this machine."""

    def __init__(self, options: UpOptions, folders: MachineFolders, loaded: LoadedService, display: StatusDisplay) -> None:
        self._options = options
        self._display = display
        self._proxy = LocalProxy()
        self._wake = asyncio.Event()
        self._machine = Machine(folders, self._proxy, self._wake.set)
        self._file = WatchedFile(options.file)
        self._file.has_changed()
        self._service = loaded.service
        self._trouble = ""
        self._signals = self._port = 0
        self._stopping = False
        self._ticker: asyncio.Task[None] | None = None
        self._set_objects(loaded)

    async def listen(self) -> None:
        self._port = await self._proxy.listen(self._options.host, self._options.port)
        self._machine.service_url = self._url()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        self._ticker = asyncio.create_task(self._tick())

    def _url(self) -> str:
        """URL of the proxy. An edit may turn TLS on or off; agents that start afterwards get the new URL."""
        host = "127.0.0.1" if self._options.host in ("0.0.0.0", "::") else self._options.host
        tls = self._service.spec is not None and self._service.spec.endpoint.tls_secret
        return f"{'https' if tls else 'http'}://{authority(host, self._port)}"

    async def run_until_signal(self) -> None:
        while not self._signals:
            self._wake.clear()
            decision = self._step()
            await self._sleep(min(RESYNC_SECONDS, decision.requeue_after or RESYNC_SECONDS))

    async def drain(self) -> int:
        """Drains as if the service were deleted. A second signal ends at once, with exit status 1."""
        self._stopping = True
        self._machine.remove_all()
        while not self._machine.is_empty and self._signals < 2:
            self._wake.clear()
            self._display_status()
            await self._sleep(RESYNC_SECONDS)
            self._machine.reconcile_pods()
        return 0 if self._machine.is_empty else 1

    async def close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        await self._machine.close()
        await self._proxy.close()

    def _step(self) -> Decision:
        observed = self._machine.observe(self._service)
        decision = plan(observed)
        self._machine.carry_out(decision, observed.token)
        self._service = dataclasses.replace(self._service, status=decision.status)
        for event in decision.events:
            self._display.event(event)
        self._display_status()
        return decision

    async def _sleep(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            if self._file.has_changed() and not self._stopping:
                self._reload()
            self._display.refresh()

    def _reload(self) -> None:
        """Loads the changed file. One that cannot be used changes only the trouble that is displayed; what runs goes on."""
        loaded = load_service(self._options.file, self._options.name, self._options.maps)
        self._trouble = "" if loaded.service.spec is not None else f"{self._options.file.name}: {loaded.service.spec_error}"
        before = self._service
        if loaded.service.spec is not None and loaded.service.name != before.name:
            self._trouble = f"{self._options.file.name} is about {loaded.service.name!r} now; start again to run that"
        elif not self._trouble:
            changed = loaded.service.spec != before.spec
            generation = before.generation + changed
            self._service = dataclasses.replace(before, spec=loaded.service.spec, spec_error=None, generation=generation)
            self._set_objects(loaded)
            self._machine.service_url = self._url()
        self._wake.set()

    def _set_objects(self, loaded: LoadedService) -> None:
        self._machine.manifest_objects = ManifestObjects(loaded.secrets, loaded.config_maps)

    def _on_signal(self) -> None:
        self._signals += 1
        self._wake.set()

    def _display_status(self) -> None:
        spec = self._service.spec
        self._display.status(
            local_status(
                service=self._service.name,
                model=spec.model.source if spec else "",
                url=f"{self._machine.service_url}/v1",
                status=self._service.status,
                wanted=0 if spec is None or spec.suspend else spec.replicas,
                pods=self._machine.pods,
                routers=self._machine.routers,
                trouble=self._trouble,
                stopping=self._stopping,
            )
        )
