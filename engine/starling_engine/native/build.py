"""Compiles the kernels into the cache folder, once per source, compiler and CPU, and loads them.

The library has a plain C interface and no torch headers, so a build takes seconds. It shares torch's OpenMP
thread pool: torch has loaded its libgomp by then, and the dynamic linker resolves ours to the same one.
"""

import ctypes
import functools
import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch  # noqa: F401  (loaded first, so that its libgomp is the one in the process)

from starling_engine import env

logger = logging.getLogger("starling.native")

KERNELS = Path(__file__).parent / "kernels"
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fopenmp",
    "-shared",
    "-fPIC",
    # Not -ffast-math: masks are -inf. These two only drop errno and floating-point traps.
    "-fno-math-errno",
    "-fno-trapping-math",
)
REQUIRED_CPU_FLAGS = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"})
BUILD_SECONDS = 300
CPU_INFO = Path("/proc/cpuinfo")


class Unavailable(Exception):
    """Why this machine has no native kernels."""


@functools.cache
def load() -> ctypes.CDLL | None:
    """The kernel library, built if need be; None, and one logged line why, where it cannot be had."""
    try:
        return ctypes.CDLL(str(_library()))
    except (Unavailable, OSError) as error:
        logger.warning("native CPU kernels are off, torch is used instead: %s", error)
        return None


def _library() -> Path:
    """Path of the built library. Raises `Unavailable`."""
    if not env.native_enabled():
        raise Unavailable("STARLING_NATIVE=0")
    cpu = _cpu_flags()
    if missing := REQUIRED_CPU_FLAGS - cpu:
        raise Unavailable(f"the CPU lacks {', '.join(sorted(missing))}")
    compiler = shutil.which("g++")
    if compiler is None:
        raise Unavailable("no g++ on the PATH")
    target = env.cache_dir() / "native" / f"{_fingerprint(compiler, cpu)}.so"
    if not target.exists():
        _compile(compiler, target)
    return target


def _cpu_flags() -> frozenset[str]:
    """The CPU's feature flags as Linux names them; empty on other systems and architectures."""
    if platform.machine() != "x86_64" or not CPU_INFO.exists():
        return frozenset()
    with CPU_INFO.open() as lines:
        flags = next((line for line in lines if line.startswith("flags")), "flags:")
    return frozenset(flags.partition(":")[2].split())


def _fingerprint(compiler: str, cpu: frozenset[str]) -> str:
    """Hash of everything that the built library depends on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256("\n".join((version, *FLAGS, *sorted(cpu))).encode())
    for source in sorted(KERNELS.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:20]


def _compile(compiler: str, target: Path) -> None:
    """Builds under a temporary name and renames, so that processes which start together do not see halves."""
    target.parent.mkdir(parents=True, exist_ok=True)
    sources = sorted(str(path) for path in KERNELS.glob("*.cpp"))
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / target.name
        command = [compiler, *FLAGS, *sources, "-o", str(built)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"the build took longer than {BUILD_SECONDS} s") from error
        if done.returncode != 0:
            raise Unavailable(f"the build failed: {done.stderr.strip()[-2000:]}")
        built.replace(target)
