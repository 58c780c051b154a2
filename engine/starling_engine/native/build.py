"""Compiles the kernels into the cache folder, once per source, compiler and CPU, and loads them.

An image has them prebuilt, in the folder that STARLING_KERNELS names: it has no compiler, and no folder to write to.

The library has a plain C interface and no torch headers, so a build takes seconds. It has its own threads (team.cpp says why).
"""

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from starling_engine import env

logger = logging.getLogger("starling.native")

KERNELS = Path(__file__).parent / "kernels"
FLAGS = (
    "-O3",
    "-std=c++17",
    "-pthread",
    "-shared",
    "-fPIC",
    # Not -ffast-math: masks are -inf. These two only drop errno and floating-point traps.
    "-fno-math-errno",
    "-fno-trapping-math",
)
NATIVE = ("-march=native",)
# The oldest CPU that REQUIRED_CPU_FLAGS admits.
PORTABLE = ("-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512")
REQUIRED_CPU_FLAGS = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"})
BUILD_SECONDS = 300
CPU_INFO = Path("/proc/cpuinfo")


class Unavailable(Exception):
    """Raised with the reason why this machine has no native kernels."""


@functools.cache
def load() -> ctypes.CDLL | None:
    """Returns the kernel library, built if necessary. None where there is none; then it logs the reason once."""
    try:
        return ctypes.CDLL(str(_library()))
    except (Unavailable, OSError) as error:
        logger.warning("native CPU kernels are off, torch is used instead: %s", error)
        return None


def _library() -> Path:
    """Returns the path of the built library. Raises `Unavailable`."""
    if not env.native_enabled():
        raise Unavailable("STARLING_NATIVE=0")
    cpu = _cpu_flags()
    if missing := REQUIRED_CPU_FLAGS - cpu:
        raise Unavailable(f"the CPU lacks {', '.join(sorted(missing))}")
    prebuilt = env.kernels_dir()
    if prebuilt is not None and (built := _prebuilt(prebuilt)).exists():
        return built
    compiler = _compiler()
    target = env.cache_dir() / "native" / f"{_fingerprint(compiler, cpu)}.so"
    if not target.exists():
        _compile(compiler, NATIVE, target)
    return target


def build_ahead(folder: Path) -> Path:
    """Builds for any CPU that can run the kernels, under a name that `STARLING_KERNELS` finds. Raises `Unavailable`."""
    target = _prebuilt(folder)
    if not target.exists():
        _compile(_compiler(), PORTABLE, target)
    return target


def _prebuilt(folder: Path) -> Path:
    """Returns a name made of the sources, so that a library of other sources is never loaded."""
    return folder / f"{_digest_sources(hashlib.sha256()).hexdigest()[:20]}.so"


def _compiler() -> str:
    compiler = shutil.which("g++")
    if compiler is None:
        raise Unavailable("no g++ on the PATH")
    return compiler


def _cpu_flags() -> frozenset[str]:
    """Returns the CPU's feature flags as Linux names them; empty on other systems and architectures."""
    if os.uname().machine != "x86_64" or not CPU_INFO.exists():
        return frozenset()
    with CPU_INFO.open() as lines:
        flags = next((line for line in lines if line.startswith("flags")), "flags:")
    return frozenset(flags.partition(":")[2].split())


def _fingerprint(compiler: str, cpu: frozenset[str]) -> str:
    """Hashes everything that the built library depends on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256("\n".join((version, *FLAGS, *NATIVE, *sorted(cpu))).encode())
    return _digest_sources(digest).hexdigest()[:20]


def _digest_sources(digest: "hashlib._Hash") -> "hashlib._Hash":
    """Adds every kernel's name and content."""
    for source in sorted(KERNELS.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest


def _compile(compiler: str, machine: tuple[str, ...], target: Path) -> None:
    """Builds under a temporary name and renames, so that no process loads an unfinished library."""
    target.parent.mkdir(parents=True, exist_ok=True)
    sources = sorted(str(path) for path in KERNELS.glob("*.cpp"))
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / target.name
        command = [compiler, *FLAGS, *machine, *sources, "-o", str(built)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"the build took longer than {BUILD_SECONDS} s") from error
        if done.returncode != 0:
            raise Unavailable(f"the build failed: {done.stderr.strip()[-2000:]}")
        built.replace(target)
