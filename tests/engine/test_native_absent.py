"""The engine goes on without native kernels, and the log says why."""

import shutil
from pathlib import Path

import pytest
from starling_engine.native import build


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Simulates the flags of a CPU that has all; nothing else speaks for or against kernels."""
    info = tmp_path / "cpuinfo"
    info.write_text(f"flags\t\t: fpu {' '.join(build.REQUIRED_CPU_FLAGS)}\n")
    monkeypatch.setattr(build, "CPU_INFO", info)
    for name in ("STARLING_NATIVE", "STARLING_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    return info


def test_the_flags_that_an_older_cpu_lacks_are_named(cpu: Path, caplog: pytest.LogCaptureFixture) -> None:
    cpu.write_text("flags\t\t: fpu avx2\n")
    assert build.load.__wrapped__() is None
    assert "the CPU lacks avx512_bf16, avx512bw" in caplog.text


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
