"""The engine takes the best kernels that the CPU has, and goes on without any; the log says why."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from starling_engine.errors import ConfigError
from starling_engine.native import build, isa
from starling_engine.native.isa import INSTRUCTION_SETS


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Simulates the flags of a CPU that has all; nothing else speaks for or against kernels."""
    info = tmp_path / "cpuinfo"
    flags = set.union(*(set(each.cpu_flags) for each in INSTRUCTION_SETS))
    info.write_text(f"flags\t\t: fpu {' '.join(flags)}\n")
    monkeypatch.setattr(isa, "CPU_INFO", info)
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="x86_64"))
    monkeypatch.setattr(isa, "may_use_tiles", lambda: True)
    monkeypatch.setattr(build, "_why_not_tiles", lambda: None)
    monkeypatch.setattr(build, "_left_out", set())
    for name in ("STARLING_NATIVE", "STARLING_KERNELS", "STARLING_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    return info


def test_the_flags_that_an_older_cpu_lacks_are_named(cpu: Path, caplog: pytest.LogCaptureFixture) -> None:
    cpu.write_text("flags\t\t: fpu avx2\n")
    assert build.load.__wrapped__() is None
    assert "the CPU lacks f16c, fma, popcnt" in caplog.text


def test_an_architecture_without_kernels_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="riscv64"))
    assert build.load.__wrapped__() is None
    assert "none for riscv64" in caplog.text


@pytest.mark.parametrize("name", [each.name for each in INSTRUCTION_SETS if each.machine == "x86_64"])
def test_the_best_set_that_a_cpu_has_is_taken(name: str, cpu: Path) -> None:
    (flags,) = [each.cpu_flags for each in INSTRUCTION_SETS if each.name == name]
    cpu.write_text(f"flags\t\t: {' '.join(flags)}\n")
    assert build.instruction_set().name == name


def test_tiles_that_the_system_does_not_give_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "may_use_tiles", lambda: False)
    assert build.instruction_set().name == "avx512_bf16"
    monkeypatch.setenv("STARLING_CPU_ISA", "amx")
    with pytest.raises(ConfigError, match="this CPU has avx512_bf16, avx512, avx2, not 'amx'"):
        build.instruction_set()


def test_tiles_that_do_not_work_are_left_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The next set is taken, unless AMX was asked for."""
    opened = []
    monkeypatch.setattr(build, "_why_not_tiles", lambda: "the compiler does not know them")
    monkeypatch.setattr(build, "_open", lambda chosen: opened.append(chosen.name))
    build.load.__wrapped__()
    assert "AMX is left out: the compiler does not know them" in caplog.text
    assert build.instruction_set().name == "avx512_bf16"
    monkeypatch.setenv("STARLING_CPU_ISA", "amx")
    monkeypatch.setattr(build, "_left_out", set())
    build.load.__wrapped__()
    assert opened == ["avx512_bf16", "amx"]


def test_a_lesser_set_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARLING_CPU_ISA", "avx2")
    assert build.instruction_set().name == "avx2"


@pytest.mark.parametrize("name", ["avx512", "neon", "AVX2"])
def test_a_set_that_the_cpu_lacks_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch, cpu: Path) -> None:
    cpu.write_text("flags\t\t: avx2 fma f16c popcnt\n")
    monkeypatch.setenv("STARLING_CPU_ISA", name)
    with pytest.raises(ConfigError, match=f"STARLING_CPU_ISA: this CPU has avx2, not '{name}'$"):
        build.load.__wrapped__()


def test_without_a_compiler_there_are_no_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STARLING_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.load.__wrapped__() is None
    assert [record.name for record in caplog.records] == ["starling.native"]
    assert "no g++" in caplog.text


def test_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("STARLING_NATIVE", "0")
    assert build.load.__wrapped__() is None
    assert "STARLING_NATIVE=0" in caplog.text


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
def test_a_failed_build_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    (kernels / "broken.cpp").write_text("int main( {")
    monkeypatch.setenv("STARLING_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "KERNELS", kernels)
    assert build.load.__wrapped__() is None
    assert "broken.cpp" in caplog.text
    assert not list(tmp_path.glob("native/*"))
