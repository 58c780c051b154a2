"""The instruction sets for which the kernels are built, one library each, and the choice of one for this machine."""

import ctypes
import functools
import os
from dataclasses import dataclass
from pathlib import Path

from starling_engine import env
from starling_engine.errors import ConfigError

CPU_INFO = Path("/proc/cpuinfo")


class Unavailable(Exception):
    """Raised with the reason why this machine has no native kernels."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """One target of the compiler.

    machine     the architecture, as `uname` calls it
    cpu_flags   the features that a CPU has to have, as Linux names them
    options     the compiler's
    """

    name: str
    machine: str
    cpu_flags: frozenset[str]
    options: tuple[str, ...]


_AVX2 = ("avx2", "fma", "f16c", "popcnt")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
_BF16 = (*_AVX512, "avx512_bf16", "avx512_vnni")

_WIDE = "-mprefer-vector-width=512"
_TILES = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")


def _options(cpu_flags: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the options that let the compiler use these features of x86-64, and no others."""
    return tuple(f"-m{flag.replace('_', '')}" for flag in cpu_flags)


AMX = InstructionSet("amx", "x86_64", frozenset({*_BF16, "amx_tile", "amx_bf16", "amx_int8"}), (*_options(_BF16), *_TILES, _WIDE))
INSTRUCTION_SETS = (
    AMX,
    InstructionSet("avx512_bf16", "x86_64", frozenset(_BF16), (*_options(_BF16), _WIDE)),
    InstructionSet("avx512", "x86_64", frozenset(_AVX512), (*_options(_AVX512), _WIDE)),
    InstructionSet("avx2", "x86_64", frozenset(_AVX2), _options(_AVX2)),
    InstructionSet(
        "neon_bf16", "aarch64", frozenset({"asimd", "asimddp", "bf16", "i8mm"}), ("-march=armv8.2-a+dotprod+bf16+i8mm",)
    ),
    InstructionSet("neon_dotprod", "aarch64", frozenset({"asimd", "asimddp"}), ("-march=armv8.2-a+dotprod",)),
    InstructionSet("neon", "aarch64", frozenset({"asimd"}), ("-march=armv8-a",)),
)
"""The best of an architecture first."""


def candidates() -> list[InstructionSet]:
    """Returns the sets that this CPU has, the best first, or only the one that STARLING_CPU_ISA names.

    Raises `Unavailable` where it has none, and ConfigError where it lacks the one that is named.
    """
    possible, wanted = of_this_cpu(), env.cpu_isa()
    if wanted is not None:
        for found in possible:
            if found.name == wanted:
                return [found]
        names = ", ".join(found.name for found in possible) or "none"
        raise ConfigError(f"this CPU has {names}, not {wanted!r}", "STARLING_CPU_ISA")
    if possible:
        return possible
    here = of_this_architecture()
    if not here:
        raise Unavailable(f"there are none for {os.uname().machine}")
    raise Unavailable(f"the CPU lacks {', '.join(sorted(here[-1].cpu_flags - cpu_flags()))}")


def of_this_cpu() -> list[InstructionSet]:
    """Returns the sets that this CPU has, and the system lets a process use, the best first."""
    flags = cpu_flags()
    if "amx_tile" in flags and not may_use_tiles():
        flags -= {"amx_tile"}
    return [found for found in of_this_architecture() if found.cpu_flags <= flags]


@functools.cache
def may_use_tiles() -> bool:
    """Asks Linux to keep the tiles of AMX for this process's threads, which it does only for those that ask."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    libc = ctypes.CDLL(None)
    return bool(libc.syscall(arch_prctl, request_permission, tile_data) == 0)


def of_this_architecture() -> list[InstructionSet]:
    return [found for found in INSTRUCTION_SETS if found.machine == os.uname().machine]


def cpu_flags() -> frozenset[str]:
    """Returns the CPU's features as Linux names them; empty on other systems."""
    if not CPU_INFO.exists():
        return frozenset()
    with CPU_INFO.open() as lines:
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), ":")
    return frozenset(flags.partition(":")[2].split())
