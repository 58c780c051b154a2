"""The operator as its own process, as in a pod."""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from tests.fork_server import OPERATOR, OPERATORS_LIBRARIES, Fork, fork
from tests.waiting import until

PROBE_SECONDS = 5.0
"""`timeoutSeconds` of the chart's probes."""


class OperatorProcess:
    """`starling operator` of one namespace. Its log is in the folder. `altered`: see altered.py."""

    def __init__(self, kubeconfig: Path, namespace: str, folder: Path, port: int, *more: str, altered: Sequence[str] = ()) -> None:
        self._environment = {"KUBECONFIG": str(kubeconfig)}
        self.port, self.log = port, folder / f"operator-{port}.log"
        self._altered = altered
        self._process: Fork
        self._arguments = [
            "operator",
            "--agent-image=example.com/agent:1",
            f"--namespace={namespace}",
            f"--own-namespace={namespace}",
            f"--http-address=127.0.0.1:{port}",
            *more,
        ]

    async def start(self) -> None:
        with self.log.open("ab") as log:
            if not self._altered:
                self._process = fork(OPERATOR, ["starling_cli.main", *self._arguments], log.fileno(), **self._environment)
                return
            # Constants are altered before other modules import them.
            command = ["tests.operator.shell.altered", *self._altered, *self._arguments]
            self._process = fork(OPERATORS_LIBRARIES, command, log.fileno(), **self._environment)

    async def started(self) -> "OperatorProcess":
        await self.start()
        await until(self.is_ready, f"the operator to be ready; see {self.log}", 90)
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def cpu_seconds(self) -> float:
        """Processor time that it has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def memory_bytes(self) -> int:
        """Its resident memory."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def kill(self) -> None:
        self._process.kill()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def ended(self) -> int:
        while (code := self._process.poll()) is None:  # noqa: ASYNC110 - processes send no events
            await asyncio.sleep(0.02)
        return code

    async def stop(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        return await self.ended()

    async def is_ready(self) -> bool:
        return (await self.get("/readyz"))[0] == 200

    async def get(self, path: str) -> tuple[int, str]:
        """Returns status and text; 0 where nobody listens, or answers within the time that a kubelet gives."""
        url, time = f"http://127.0.0.1:{self.port}{path}", aiohttp.ClientTimeout(PROBE_SECONDS)
        try:
            async with aiohttp.ClientSession(timeout=time) as session, session.get(url) as response:
                return response.status, await response.text()
        except (aiohttp.ClientError, TimeoutError):
            return 0, ""

    async def metric(self, name: str) -> float:
        """Returns the sum over the metric's labels; 0 where there is none."""
        lines = (await self.get("/metrics"))[1].splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    async def settled(self) -> None:
        """Waits until it has nothing to do. A starved one may be quiet for a while, but hardly for four checks."""
        runs = [await self.metric("starling_operator_reconcile_total")]

        async def is_settled() -> bool:
            await asyncio.sleep(0.5)
            runs.append(await self.metric("starling_operator_reconcile_total"))
            return len(runs) > 4 and len(set(runs[-5:])) == 1

        await until(is_settled, "the operator to be quiet")

    async def more_runs(self, than: float) -> None:
        async def has_run() -> bool:
            return await self.metric("starling_operator_reconcile_total") > than

        await until(has_run, "another reconcile")
