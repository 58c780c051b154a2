"""Compiles the kernels into the cache folder, once per source, compiler and instruction set, and loads them.

An image has them prebuilt, in the folder that STARLING_KERNELS names: it has no compiler, and no folder to write to.

The library has a plain C interface and no torch headers, so a build takes seconds. It has its own threads (team.cpp says why).
"""

import ctypes
import functools
import hashlib
import logging
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from starling_engine import env
from starling_engine.native import isa
from starling_engine.native.isa import InstructionSet, Unavailable
from starling_engine.platforms.cgroup import cpu_limit

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
    # The vectors that functions take and return are inlined; no ABI is involved.
    "-Wno-psabi",
)
BUILD_SECONDS = 300


@functools.cache
def load() -> ctypes.CDLL | None:
    """Returns the kernel library, built if necessary. None where there is none; then it logs the reason once.

    Raises ConfigError where STARLING_CPU_ISA names a set that this CPU lacks.
    """
    try:
        chosen = instruction_set()
        if chosen is isa.AMX and env.cpu_isa() is None and (reason := _why_not_tiles()) is not None:
            logger.warning("AMX is left out: %s", reason)
            _left_out.add(chosen.name)
            chosen = instruction_set()
        library = _open(chosen)
    except (Unavailable, OSError) as error:
        logger.warning("native CPU kernels are off, torch is used instead: %s", error)
        return None
    logger.info("native CPU kernels: %s", chosen.name)
    return library


def _open(chosen: InstructionSet) -> ctypes.CDLL:
    path = _library(chosen)
    if not path.exists():
        _compile(_compiler(), chosen, path)
    return ctypes.CDLL(str(path))


_left_out: set[str] = set()
"""Names of sets that this CPU has, and that this process does without."""


def _why_not_tiles() -> str | None:
    """Returns why the kernels with tiles cannot be used. Older compilers do not know them, and few CPUs have run them."""
    try:
        return None if _open(isa.AMX).starling_tiles_work() else "a product by tiles is not the one by registers"
    except (Unavailable, OSError) as error:
        return str(error)


def instruction_set() -> InstructionSet:
    """Returns the set whose kernels are for this process. Raises `Unavailable`, and ConfigError as `load` does."""
    if not env.native_enabled():
        raise Unavailable("STARLING_NATIVE=0")
    return next(each for each in isa.candidates() if each.name not in _left_out)


def instruction_set_name() -> str:
    """Returns the name of that set, or "none" where its library is not there: builds nothing. Raises ConfigError as `load` does."""
    try:
        chosen = instruction_set()
        return chosen.name if _library(chosen).exists() else "none"
    except Unavailable:
        return "none"


def _library(chosen: InstructionSet) -> Path:
    """Returns where the library is, or is to be built. Raises `Unavailable`."""
    prebuilt = env.kernels_dir()
    if prebuilt is not None and (built := _prebuilt(prebuilt, chosen)).exists():
        return built
    compiler = _compiler()
    return env.cache_dir() / "native" / f"{chosen.name}-{_fingerprint(compiler, chosen)}.so"


def build_ahead(folder: Path, chosen: InstructionSet) -> Path:
    """Builds for any CPU that has the set, under a name that `STARLING_KERNELS` finds. Raises `Unavailable`."""
    target = _prebuilt(folder, chosen)
    if not target.exists():
        _compile(_compiler(), chosen, target)
    return target


def _prebuilt(folder: Path, chosen: InstructionSet) -> Path:
    """Returns a name made of sources and options, so that a library of others is never loaded."""
    return folder / f"{chosen.name}-{_digest('', chosen, KERNELS)}.so"


def _compiler() -> str:
    compiler = shutil.which("g++")
    if compiler is None:
        raise Unavailable("no g++ on the PATH to build them (apt install g++); the agent's image has them")
    return compiler


def _fingerprint(compiler: str, chosen: InstructionSet) -> str:
    """Hashes everything that the built library depends on."""
    return _digest(_version(compiler), chosen, KERNELS)


@functools.cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout


@functools.cache
def _digest(version: str, chosen: InstructionSet, kernels: Path) -> str:
    """Hashes a compiler's version, the options, and every kernel's name and content."""
    digest = hashlib.sha256("\n".join((version, *FLAGS, *chosen.options)).encode())
    for source in sorted(kernels.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:20]


def _compile(compiler: str, chosen: InstructionSet, target: Path) -> None:
    """Builds under a temporary name and renames, so that no process loads an unfinished library."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / target.name
        command = [compiler, *FLAGS, *chosen.options]
        # The attention takes as long as all else, so it goes first.
        sources = sorted(KERNELS.glob("*.cpp"), key=lambda path: not path.name.startswith("attention"))
        objects = [str(Path(scratch) / f"{source.stem}.o") for source in sources]
        with ThreadPoolExecutor(cpu_limit()) as threads:
            list(threads.map(lambda source, made: _run([*command, "-c", str(source), "-o", made]), sources, objects))
        _run([*command, *objects, "-o", str(built)])
        built.replace(target)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"the build took longer than {BUILD_SECONDS} s") from error
    if done.returncode != 0:
        raise Unavailable(f"the build failed: {done.stderr.strip()[-2000:]}")
