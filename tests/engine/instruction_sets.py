"""The instruction sets whose kernels a process does not use by itself: of this CPU, a model of AMX's, and an emulated arm64's.

`python -m tests.engine.instruction_sets` builds them into the cache, which takes minutes that tests would wait for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from starling_engine.native import bindings, build, instruction_set_name, isa
from starling_engine.native.group_quantized import Format

from tests.engine.emulated import SETS, emulating, has_emulator

EMULATED = "emulated "
_WITHOUT = next(found for found in isa.INSTRUCTION_SETS if found.name == "avx512_bf16")
TILES = replace(_WITHOUT, name="modelled amx", options=(*_WITHOUT.options, "-DSTARLING_TILE_MODEL"))
"""The kernels of AMX, whose tiles are memory (`kernels/tiles.h`)."""
BETWEEN = EMULATED + "neon_dotprod"
"""It stands between neon, which lacks the same, and neon_bf16, which has all of it: only a run with --whole takes it."""
ROWS_BY_REGISTERS = 32
"""The most rows of x that are never multiplied by codes of whole numbers so."""
FP8_ROWS_BY_REGISTERS = 4
_emulated: str | None = None
"""The set that is emulated now. The process's own is the same meanwhile."""


def other_sets() -> list[str]:
    """Returns the names of the sets that this machine can run, besides the one that is in use."""
    here = [found.name for found in isa.of_this_cpu() if found.name != instruction_set_name()]
    modelled = [TILES.name] if TILES.cpu_flags <= isa.cpu_flags() else []
    return here + modelled + [EMULATED + name for name in SETS]


def multiplies_by_tiles() -> bool:
    """Returns whether many rows are multiplied by tiles now, whose sums have another order than those of few."""
    return _emulated is None and instruction_set_name() in ("amx", TILES.name)


def unpacked_by_tiles(m: int, k: int, form: Format) -> bool:
    """Returns whether the set in use multiplies so many rows by codes of so many columns that become numbers in bfloat16 first."""
    few = FP8_ROWS_BY_REGISTERS if form.floats else ROWS_BY_REGISTERS
    return multiplies_by_tiles() and m > few and k % 32 == 0 and (form.floats or form.rounded < 128)


def every_set() -> list[Any]:
    """Returns the parameters of a fixture: None, for the set in use, and the others, which only a run with --whole takes."""
    return [None, *(pytest.param(name, marks=pytest.mark.whole) for name in other_sets())]


@contextmanager
def using(name: str | None) -> Iterator[None]:
    """Lets this process use the kernels of another set; None changes nothing."""
    if name is None:
        yield
        return
    if name.startswith(EMULATED):
        if not has_emulator():
            pytest.skip("no cross-compiler or emulator of arm64 here: see `make arm64`")
        with emulating(name.removeprefix(EMULATED)), pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"{__name__}._emulated", name)
            yield
        return
    try:
        with pytest.MonkeyPatch.context() as patch:
            if name == TILES.name:
                patch.setattr(isa, "candidates", lambda: [TILES])
            else:
                patch.setenv("STARLING_CPU_ISA", name)
            _load_again()
            assert build.load() is not None
            yield
    finally:
        _load_again()


def _load_again() -> None:
    build.load.cache_clear()
    bindings.loaded.cache_clear()


def main() -> None:
    if build.load() is None:
        return
    for name in other_sets():
        if name != BETWEEN and (has_emulator() or not name.startswith(EMULATED)):
            with using(name):
                print(f"native CPU kernels for tests: {name}", flush=True)


if __name__ == "__main__":
    main()
