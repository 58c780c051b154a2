"""What the processes of the engine have in common."""

import gc
import sys
from pathlib import Path

import pytest
from starling_engine.child import import_for_good, start


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
        gc.unfreeze()
    assert gc.isenabled()


@pytest.mark.parametrize(("asked", "policy"), [(None, "passive"), ("active", "active")])
def test_threads_that_wait_leave_the_processor_to_others_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, policy: str
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", asked)
    process = start("base64", "-")  # lives until its input ends
    with process:
        environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    assert f"OMP_WAIT_POLICY={policy}".encode() in environment
