"""What the processes of the engine have in common."""

import gc
import sys
from pathlib import Path

import pytest
from starling_engine.child import import_for_good


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
