"""A folder whose users are killed at any instant opens and serves right."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from starling_engine.kv_offload.secondary.base import ObjectMissing
from starling_engine.kv_offload.secondary.folder import janitor, usage
from starling_engine.kv_offload.secondary.folder.inspect import verify

from tests.engine.kv_offload import killed
from tests.engine.kv_offload.objects import FILE, content, quiet_tier, read, run_janitor

KILLS = 200


@pytest.mark.timeout(180)
def test_200_kills_leave_a_folder_that_serves_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, killed.__file__, str(tmp_path), str(KILLS)]
    run = subprocess.run(command, cwd=Path(__file__).parents[3], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    done = re.match(r"(\d+) objects, (\d+) kills", run.stdout)
    assert done is not None and int(done[1]) > killed.FITS and int(done[2]) > 0, f"some were evicted, some cut off: {run.stdout}"

    assert [wrong for _, wrong in verify(tmp_path) if wrong] == []
    monkeypatch.setattr(usage, "DURATION", -1.0)
    monkeypatch.setattr(janitor, "ABANDONED", -1.0)
    tier = quiet_tier(tmp_path, killed.LIMIT)
    run_janitor(tier)
    tier.janitor.tick()
    assert not list((tmp_path / "tmp").iterdir())
    files = list(tmp_path.rglob("*.kv"))
    assert len(files) == tier.counters.objects and len(files) * FILE <= killed.LIMIT
    for number in range(killed.NUMBERS):
        try:
            assert read(tier, number) == content(number)
        except ObjectMissing:
            continue
    assert (tier.counters.corrupt, tier.counters.errors) == (0, 0)
