"""The engine's native kernels for thin images, built ahead as the Dockerfile does: a pod that compiles for itself at each
start would keep two cores busy for ten seconds.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

from starling_cluster import cache

SOURCES = cache.ROOT / "engine" / "starling_engine" / "native"


def folder() -> Path:
    """For the sources as they are now; not there where this Python or machine cannot build them; then pods compute with torch."""
    target = cache.folder() / f"kernels-{_fingerprint()}"
    with cache.lock(cache.folder() / "kernels.lock"):
        if not target.exists():
            target.mkdir()
            _build(target)
    return target


def _build(target: Path) -> None:
    command = [sys.executable, "-m", "starling_engine.native", str(target), "--this-cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        print(f"thin images have no native kernels: {why}", file=sys.stderr)
        target.rmdir()


def _fingerprint() -> str:
    """Hashes the sources and the modules that build them."""
    digest = hashlib.sha256()
    for source in (SOURCES / "build.py", SOURCES / "isa.py", *sorted((SOURCES / "kernels").iterdir())):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]
