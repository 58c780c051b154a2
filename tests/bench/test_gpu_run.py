"""The GPU benchmark as a program: which sections a command means, and what a run leaves whatever happens to it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from bench.gpu import __main__ as program
from bench.gpu import keep
from bench.gpu.faults import DeviceFault, each_case
from bench.gpu.sections import GROUPS, SECTIONS, chosen
from bench.gpu.table import Row


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUT", str(tmp_path))
    return tmp_path


def test_words_of_a_command() -> None:
    assert chosen(["first"], None) == (("limits", "smoke", "8B"), 235.0)
    everything, seconds = chosen([], None)
    assert set(SECTIONS) - set(everything) == {"compile"} and seconds == 540
    assert chosen(["8B", "first"], 99.0) == (("8B", "limits", "smoke"), 99.0)
    with pytest.raises(KeyError, match="prefill"):
        chosen(["limits", "prefill"], None)


def test_the_first_minutes_are_enough_for_what_they_have_to_hold() -> None:
    """The last section gets what is left, and that is more than it needs where the others take all of theirs."""
    first = GROUPS["first"]
    assert first.seconds < 240
    assert first.seconds - sum(SECTIONS[name].seconds for name in first.sections[:-1]) >= 100


@dataclass(frozen=True)
class Thing:
    what: str
    error: Exception | None = None


def run(thing: Thing) -> Iterator[Row]:
    if thing.error is not None:
        raise thing.error
    yield Row(thing.what, "done")


def test_a_case_that_fails_is_a_row_and_the_next_one_runs(out: Path) -> None:
    found: list[Row] = []
    with pytest.raises(SystemExit, match="broken"):
        collect([Thing("broken", ValueError("no such page")), Thing("whole")], found)
    assert [(row.what, row.measured) for row in found] == [("broken", "failed"), ("whole", "done")]
    assert "no such page" in (out / "failures.txt").read_text()


def collect(things: list[Thing], found: list[Row]) -> None:
    """Adds to `found` as rows come, so that they are there whatever is raised."""
    for row in each_case(things, run):
        found.append(row)


@pytest.mark.usefixtures("out")
def test_after_a_fault_of_the_device_another_process_goes_on_with_the_next_case() -> None:
    things = [Thing("one"), Thing("two", torch.AcceleratorError("an illegal memory access")), Thing("three")]
    found: list[Row] = []
    with pytest.raises(DeviceFault) as fault:
        collect(things, found)
    assert fault.value.done == 2
    found.extend(each_case(things, run, skip=fault.value.done))
    assert [(row.what, row.measured) for row in found] == [("one", "done"), ("two", "failed"), ("three", "done")]


def test_a_section_that_dies_leaves_its_rows_and_its_words(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program.sys, "executable", str(_python(out)))
    body, well = program.run_section("limits", 600, toy=True)
    assert not well and "| first | 1 |" in body and "and then nothing" in body and "exit status -9" in body
    _, rows = keep.Rows().since(0)
    assert [row.what for row in rows] == ["first"]
    assert "and then nothing" in (out / "log.txt").read_text()


def _python(out: Path) -> Path:
    """A program in the interpreter's place, which says something and is killed."""
    program = out / "python"
    line = '{"section": "limits", "row": {"what": "first", "measured": "1"}}'
    program.write_text(f"#!/bin/sh\necho '{line}' >> {out}/rows.jsonl\necho and then nothing\nkill -9 $$\n")
    program.chmod(0o755)
    return program


def test_a_run_that_is_ended_keeps_what_it_has_found_and_leaves_nothing_running(out: Path) -> None:
    """A limit of time from outside leaves a row, what was said, the table, and no process that holds a card."""
    slow, row = out / "slow", {"section": "limits", "row": {"what": "first", "measured": "1"}}
    slow.write_text(
        f"#!{sys.executable}\n"
        "import os, time\n"
        f"open('{out}/rows.jsonl', 'a').write({json.dumps(row)!r} + chr(10))\n"
        f"open('{out}/pid', 'w').write(str(os.getpid()))\n"
        "time.sleep(300)\n"
    )
    slow.chmod(0o755)
    run = "import sys; from bench.gpu import __main__ as program; sys.executable = sys.argv.pop(1); program.main()"
    command = [sys.executable, "-c", run, str(slow), "--toy", "limits", "smoke", "--results", str(out / "table.md")]
    with subprocess.Popen(command, cwd=keep.ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while not ((out / "pid").exists() and (out / "pid").read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1 and "limits, smoke" in said
    table = (out / "gpu.md").read_text()
    assert "| first | 1 |" in table and "the run was ended" in table and "KeyboardInterrupt" in table
    assert table == (out / "table.md").read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(int((out / "pid").read_text()), 0)


def test_kernels_of_a_run_are_found_by_another(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "ABC").mkdir(parents=True)
    (there / "ABC" / "kernel.cubin").write_bytes(b"code")
    (there / "ABC" / "kernel.cubin.tmp.pid_1").write_bytes(b"half")
    monkeypatch.setattr(keep, "KERNELS", there)
    keep.pack_kernels()
    monkeypatch.setattr(keep, "KERNELS", here)
    keep.unpack_kernels(out / "kernels.tar.xz")
    assert {str(path.relative_to(here)) for path in here.rglob("*") if path.is_file()} == {"ABC/kernel.cubin"}
