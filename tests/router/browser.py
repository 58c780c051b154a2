"""A headless Chromium that tests drive over its DevTools protocol, so that no other package is needed."""

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.waiting import until

CHROMIUM = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)


class Tab:
    """One tab. `complaints` are what its console and its policy reported, and errors that nobody caught."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.complaints: list[str] = []

    async def listen(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            elif said["method"] in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Audits.issueAdded"):
                self.complaints.append(json.dumps(said["params"]))

    async def call(self, method: str, **params: object) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        said = await answer
        assert "error" not in said, said["error"]
        return dict(said["result"])

    async def run(self, script: str) -> Any:
        """Returns the value of an expression, awaited."""
        said = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    async def until(self, script: str) -> None:
        """Waits for an expression to be true."""

        async def shown() -> object:
            return await self.run("document.body.innerText")

        await until(lambda: self.run(f"Boolean({script})"), script, shown=shown)

    async def open(self, url: str, width: int, height: int = 844, *, dark: bool = False) -> None:
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[theme])
        await self.call("Page.navigate", url=url)
        await self.until(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    async def type(self, selector: str, text: str) -> None:
        """Types into a field, as keys do."""
        await self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)

    async def picture(self) -> bytes:
        """Returns a PNG of the whole page."""
        said = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(said["data"])


@asynccontextmanager
async def browsing(folder: Path) -> AsyncIterator[Tab]:
    """Yields a tab of a browser whose profile is in a folder."""
    assert CHROMIUM is not None
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0")
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, *flags, f"--user-data-dir={folder}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    port = folder / "DevToolsActivePort"

    async def has_port() -> bool:
        return port.exists() and "\n" in port.read_text()

    try:
        await until(has_port, "the browser to listen")
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port.read_text().split()[0]}") as session:
            targets = await (await session.get("/json")).json()
            url = next(target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page")
            async with session.ws_connect(url, max_msg_size=0) as socket:
                tab = Tab(socket)
                listening = asyncio.create_task(tab.listen())
                for domain in ("Page", "Runtime", "Log", "Audits"):
                    await tab.call(f"{domain}.enable")
                yield tab
                listening.cancel()
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # what is on the path may be a script that started it
        await process.wait()
