"""The decisions load fast and know no cluster: `starling plan` runs them on a laptop."""

import subprocess
import sys

HEAVY = ("torch", "kopf", "kubernetes", "aiohttp", "httpx", "numpy", "asyncio", "starling_engine.frontend", "starling_agent.http")


def test_nothing_heavy_is_loaded() -> None:
    code = "import sys, starling_operator.plan.plan; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in HEAVY if name in loaded] == []
