"""The folder of a run goes with the run, at the latest with the next one."""

import subprocess
import sys

import pytest
from starling_cli.local.run_folder import run_folder


@pytest.fixture(autouse=True)
def parent(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_it_is_private_and_removed(parent):
    with run_folder() as folder:
        assert folder.parent == parent
        assert folder.stat().st_mode & 0o077 == 0
    assert not list(parent.iterdir())


def test_it_is_removed_when_something_fails(parent):
    with pytest.raises(RuntimeError), run_folder():
        raise RuntimeError
    assert not list(parent.iterdir())


def test_runs_side_by_side_leave_each_other_alone():
    with run_folder() as one, run_folder() as two:
        assert one.exists()
        assert two.exists()


def test_what_a_killed_run_left_is_swept(parent):
    code = (
        "import os, signal, tempfile\nfrom starling_cli.local.run_folder import run_folder\n"
        f"tempfile.tempdir = {str(parent)!r}\nwith run_folder(): os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    (left,) = parent.iterdir()
    with run_folder() as folder:
        assert not left.exists()
        assert list(parent.iterdir()) == [folder]
