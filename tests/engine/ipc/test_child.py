"""Child processes of the engine."""

import gc
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from starling_engine.ipc.child import import_for_good, start
from starling_engine.ipc.log_lines import parse_line


@pytest.mark.parametrize("source", ["KEPT = [[]]", "KEPT = [[]]; raise OSError"])
def test_what_is_imported_for_good_is_looked_through_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    (tmp_path / "lasting.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    before = gc.get_freeze_count()
    try:
        kept = import_for_good("lasting").KEPT
        assert import_for_good("lasting").KEPT is kept
        assert gc.get_freeze_count() > before
        assert not any(each is kept for each in gc.get_objects())
    except OSError:
        assert "raise" in source
    finally:
        sys.modules.pop("lasting", None)
    assert gc.isenabled()


@pytest.mark.parametrize(("asked", "policy"), [(None, "passive"), ("active", "active")])
def test_threads_that_wait_leave_the_processor_to_others_unless_set_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str | None, policy: str
) -> None:
    (tmp_path / "telling.py").write_text("import os, sys; sys.stderr.write(os.environ['OMP_WAIT_POLICY'])")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", asked)
    process = start("telling", stderr=subprocess.PIPE)
    assert process.communicate()[1].decode() == policy


@pytest.mark.parametrize(
    ("level", "later", "heard"),
    [
        ("DEBUG", None, ["debug", "info"]),
        ("INFO", None, ["info"]),
        ("ERROR", None, ["info"]),
        ("INFO", logging.DEBUG, ["debug", "info"]),
        ("DEBUG", logging.INFO, ["info"]),
    ],
)
def test_a_child_logs_at_its_parents_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, later: int | None, heard: list[str]
) -> None:
    """`later` is the level that it is told when it has started."""
    lines = "logging.getLogger('starling.core').debug('debug'); logging.getLogger('starling.core').info('info')"
    start_logging = f"from starling_engine.ipc.child import live_with_parent; live_with_parent({later})"
    source = f"import logging, os; {start_logging}; {lines}; os._exit(0)"
    (tmp_path / "talking.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    monkeypatch.setattr(logging.getLogger("starling"), "level", logging.getLevelNamesMapping()[level])
    with start("talking", stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert [parse_line(line).message for line in process.stderr] == heard
