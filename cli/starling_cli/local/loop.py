"""Observe, plan, carry out, show: once for each thing that happened, until a signal says to go."""

import asyncio
import contextlib
import dataclasses
import signal
from dataclasses import dataclass
from pathlib import Path

from starling_agent.contract.listening import authority
from starling_operator.plan.decision import Decision
from starling_operator.plan.plan import plan

from starling_cli.local.following import FollowedFile
from starling_cli.local.front import LocalProxy
from starling_cli.local.machine import Machine, MachineFolders, ManifestObjects
from starling_cli.local.run_folder import run_folder
from starling_cli.local.service_file import LoadedService, load_service
from starling_cli.local.show import StatusDisplay
from starling_cli.local.sources import PathMap
from starling_cli.local.view import view_of

RESYNC_SECONDS = 5.0
"""A silent agent makes no event; its silence grows all the same."""
BEAT_SECONDS = 0.5


@dataclass(frozen=True)
class UpOptions:
    """weights: where downloads are kept. logs: a folder for agents' logs that stays; None: they go with the run."""

    file: Path
    name: str | None
    host: str
    port: int
    maps: tuple[PathMap, ...]
    weights: Path
    logs: Path | None = None


async def run(options: UpOptions, loaded: LoadedService, show: StatusDisplay) -> int:
    """Runs the service of the file until a signal; the exit status. Raises OSError where the port is taken."""
    with run_folder() as folder:
        logs = options.logs or folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        options.weights.mkdir(parents=True, exist_ok=True)
        up = LocalService(options, MachineFolders(folder, logs, options.weights, options.maps, options.file.name), loaded, show)
        try:
            await up.listen()
            await up.until_told()
            return await up.drain()
        finally:
            await up.close()


class LocalService:
    """One service at work on this machine."""

    def __init__(self, options: UpOptions, ground: MachineFolders, loaded: LoadedService, show: StatusDisplay) -> None:
        self._options = options
        self._show = show
        self._front = LocalProxy()
        self._wake = asyncio.Event()
        self._machine = Machine(ground, self._front, self._wake.set)
        self._file = FollowedFile(options.file)
        self._file.has_changed()
        self._service = loaded.service
        self._trouble = ""
        self._signals = self._port = 0
        self._stopping = False
        self._beating: asyncio.Task[None] | None = None
        self._give(loaded)

    async def listen(self) -> None:
        self._port = await self._front.listen(self._options.host, self._options.port)
        self._machine.service_url = self._url()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._told_to_go)
        self._beating = asyncio.create_task(self._beat())

    def _url(self) -> str:
        """Of the front port. An edit may turn TLS on or off; agents that start from then on are told so."""
        host = "127.0.0.1" if self._options.host in ("0.0.0.0", "::") else self._options.host
        tls = self._service.spec is not None and self._service.spec.endpoint.tls_secret
        return f"{'https' if tls else 'http'}://{authority(host, self._port)}"

    async def until_told(self) -> None:
        while not self._signals:
            self._wake.clear()
            decision = self._step()
            await self._sleep(min(RESYNC_SECONDS, decision.wake_after or RESYNC_SECONDS))

    async def drain(self) -> int:
        """As if the service were deleted. A second signal ends at once, with exit status 1."""
        self._stopping = True
        self._machine.remove_all()
        while self._machine.pods and self._signals < 2:
            self._wake.clear()
            self._draw()
            await self._sleep(RESYNC_SECONDS)
            self._machine.settle()
        return 1 if self._machine.pods else 0

    async def close(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
        await self._machine.close()
        await self._front.close()

    def _step(self) -> Decision:
        decision = plan(self._machine.observe(self._service))
        self._machine.carry_out(decision)
        self._service = dataclasses.replace(self._service, status=decision.status)
        for event in decision.events:
            self._show.event(event)
        self._draw()
        return decision

    async def _sleep(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            if self._file.has_changed() and not self._stopping:
                self._reload()
            self._show.beat()

    def _reload(self) -> None:
        """What cannot be used changes nothing but the trouble that is shown; what runs goes on."""
        loaded = load_service(self._options.file, self._options.name, self._options.maps)
        self._trouble = "" if loaded.service.spec is not None else f"{self._options.file.name}: {loaded.service.spec_error}"
        before = self._service
        if loaded.service.spec is not None and loaded.service.name != before.name:
            self._trouble = f"{self._options.file.name} is about {loaded.service.name!r} now; start anew to run that"
        elif not self._trouble:
            changed = loaded.service.spec != before.spec
            generation = before.generation + changed
            self._service = dataclasses.replace(before, spec=loaded.service.spec, spec_error=None, generation=generation)
            self._give(loaded)
            self._machine.service_url = self._url()
        self._wake.set()

    def _give(self, loaded: LoadedService) -> None:
        self._machine.given = ManifestObjects(loaded.secrets, loaded.config_maps)

    def _told_to_go(self) -> None:
        self._signals += 1
        self._wake.set()

    def _draw(self) -> None:
        spec = self._service.spec
        self._show.view(
            view_of(
                service=self._service.name,
                model=spec.model.source if spec else "",
                url=f"{self._machine.service_url}/v1",
                status=self._service.status,
                wanted=0 if spec is None or spec.suspend else spec.replicas,
                pods=self._machine.pods,
                trouble=self._trouble,
                stopping=self._stopping,
            )
        )
