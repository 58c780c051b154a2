"""`starling quantize`, as it is typed."""

import re
from pathlib import Path

import pytest
from starling_cli.main import app
from starling_engine.model_config.config import load_model_config
from typer.testing import CliRunner

from tests.engine.real_engine import MODEL


def test_it_writes_a_checkpoint_that_can_be_served(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["quantize", MODEL, str(tmp_path / "out"), "--scheme", "w4a16", "--group-size", "32"])
    assert done.exit_code == 0, done.output
    found = re.search(rf"([0-9.]+) MB of weights in W4A16; starling serve {tmp_path / 'out'}", done.output)
    assert found is not None, done.output
    assert float(found[1]) == pytest.approx((tmp_path / "out" / "model.safetensors").stat().st_size / 1e6, abs=0.1)
    quantization = load_model_config(tmp_path / "out").quantization
    assert quantization is not None and quantization.method == "compressed-tensors"
    again = CliRunner().invoke(app, ["quantize", MODEL, str(tmp_path / "out")])
    assert "0 tensors" not in again.output, "no empty bar"
    assert again.exit_code == 1 and "is not empty" in again.output and "fix:   name a folder that is new or empty" in again.output


def test_wrong_use_is_named(tmp_path: Path) -> None:
    for options, message in (
        (["--scheme", "W3A3"], "fix:   take one of W4A16, W8A16, W8A8, FP8_DYNAMIC"),
        (["--scheme", "W8A8", "--group-size", "32"], "--group-size 32 does not go with W8A8"),
        (["--group-size", "40"], "it is for W4A16, and a multiple of 32"),
    ):
        done = CliRunner().invoke(app, ["quantize", MODEL, str(tmp_path / "out"), *options])
        assert done.exit_code == 2 and message in done.output, done.output
