"""`starling serve` starts the process of the engine core before it reads its flags, which say whether that helps."""

import pytest
from starling_cli.commands import serve
from starling_engine.core import launcher

from tests.cli.commands.running import starling


@pytest.mark.parametrize(
    ("arguments", "events"),
    [
        (["serve", "model"], ["start", "serve", "end"]),
        (["serve", "model", "--tensor-parallel-size", "2"], ["start", "end", "serve", "end"]),
        (["serve", "model", "--enable-expert-parallel"], ["start", "end", "serve", "end"]),
        (["serve", "model", "--block-size", "7"], ["start", "end"]),
        (["serve", "--help"], []),
        (["crds"], []),
    ],
)
def test_the_core_starts_ahead_of_a_server_with_one_rank(monkeypatch, arguments, events):
    seen = []
    monkeypatch.setattr(launcher, "start_ahead", lambda: seen.append("start"))
    monkeypatch.setattr(launcher, "end_ahead", lambda: seen.append("end"))
    monkeypatch.setattr(serve, "_run", lambda *_: seen.append("serve") or 0)
    starling(*arguments)
    assert seen == events
