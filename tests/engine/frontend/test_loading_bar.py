"""What a script shows while its model loads."""

import pytest
from starling_engine.core.messages import Loading
from starling_engine.frontend.loading_bar import LoadingBar

HALF, WHOLE = Loading("load", 1 << 30, 2 << 30), Loading("load", 2 << 30, 2 << 30)


def test_lines_now_and_then_without_a_terminal(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("starling_engine.frontend.loading_bar.SECONDS_BETWEEN_LINES", 0.0)
    with caplog.at_level("INFO", "starling.weights"):
        bar = LoadingBar()
        bar(Loading("init"))
        bar(HALF)
        bar.close()
    (line,) = caplog.messages
    assert line.startswith("loading weights: 1.00 GiB of 2.00 GiB")


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    bar = LoadingBar()
    bar(HALF)
    bar(WHOLE)
    bar.close()
    shown = capsys.readouterr().err
    assert "Loading weights" in shown and "2.00G/2.00G" in shown
