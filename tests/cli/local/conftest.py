"""Starts `starling up` as a user would, with the repository's model."""

import pytest

from tests.cli.local.running import RunningUp


@pytest.fixture
def up(tmp_path):
    started = []

    def start(manifest, *flags):
        started.append(RunningUp(manifest, tmp_path, *flags))
        return started[-1]

    yield start
    for running in started:
        running.close()
