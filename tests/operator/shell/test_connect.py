"""The way to the API server: the proxy that the environment names, or none."""

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from kubernetes.aio.config import kube_config
from starling_operator.cluster.kube import Kube, connect

CONFIG = """
current-context: here
contexts: [{name: here, context: {cluster: here, user: here}}]
clusters: [{name: here, cluster: {server: "%s"}}]
users: [{name: here, user: {token: t}}]
"""


@pytest.mark.parametrize(("excepted", "way"), [("", "by the proxy"), ("127.0.0.9", "direct")])
async def test_requests_take_the_proxy_that_the_environment_names(
    excepted: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer t"
        name = request.transport.get_extra_info("sockname")[0] if request.transport is not None else ""
        return web.json_response({"way": "direct" if name == "127.0.0.9" else "by the proxy"})

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.8", 0)
    await site.start()
    proxy_port = runner.addresses[0][1]
    await web.TCPSite(runner, "127.0.0.9", proxy_port).start()
    (tmp_path / "config").write_text(CONFIG % f"http://127.0.0.9:{proxy_port}")
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    monkeypatch.setenv("http_proxy", f"http://127.0.0.8:{proxy_port}")
    monkeypatch.setenv("no_proxy", excepted)
    kube = Kube(await connect(), lambda: 30.0)
    async with asyncio.timeout(30):
        assert await kube.get("/version") == {"way": way}
    await kube.close()
    await runner.cleanup()


@pytest.mark.parametrize(("excepted", "proxy"), [("fd00::2", "http://127.0.0.8:1"), ("fd00::1", None)])
async def test_an_ipv6_address_may_be_excepted(
    excepted: str, proxy: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text(CONFIG % "https://[fd00::1]:443")
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    monkeypatch.setenv("https_proxy", "http://127.0.0.8:1")
    monkeypatch.setenv("no_proxy", excepted)
    client = await connect()
    assert client.configuration.proxy == proxy
    await client.close()
