"""The pure parts: when to restart, what is refused, what counts as a change."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from starling_agent.contract.config import AgentConfig, RecoveryConfig
from starling_agent.contract.identity import read_identity
from starling_agent.contract.report import PHASES, Phase, Progress, Report
from starling_agent.node.configuration import read_configuration
from starling_agent.node.engine_args import engine_args, possible_names
from starling_agent.node.failures import NodeFailure, Unreadable, fatal, passing
from starling_agent.node.first_token import own_url
from starling_agent.node.progress import ProgressTeller, eta, phase_of
from starling_agent.node.recovery import GiveUp, Restart, after_failure
from starling_agent.node.refusals import refusal
from starling_agent.node.switchable_app import waiting_error
from starling_agent.node.totals import added
from starling_agent.node.weights import local_folder, obtain
from starling_agent.report_state import ReportState, changed
from starling_engine.core.messages import Loading
from starling_engine.delta import Stats
from starling_engine.errors import ConfigError, EngineDead, ModelError, UnsupportedModel

from tests.agent.node.conftest import MODEL, configuration

DEAD = EngineDead("x")


def report(**fields: Any) -> Report:
    settings: dict[str, Any] = {
        "version": 1,
        "incarnation": "i",
        "agent": "0",
        "config_hash": "h",
        "service": "s",
        "revision": "r",
        "group": "s-r-0",
        "node": 0,
        "pod": "s-r-0-0",
        "phase": "starting",
    }
    return Report(**{**settings, **fields})


def config(tmp_path: Path, **changes: Any) -> AgentConfig:
    return AgentConfig.model_validate(configuration(tmp_path, **changes))


# ---- recovery ----


@pytest.mark.parametrize(
    ("error", "served", "restarts", "now", "decision"),
    [
        (DEAD, True, [], 100, Restart(1)),
        (DEAD, False, [], 100, Restart(1)),
        (DEAD, True, [99], 100, Restart(2)),
        (DEAD, True, [90, 95], 100, Restart(4)),
        (DEAD, True, [80, 90, 95], 100, GiveUp(fatal=False)),
        (DEAD, True, [39, 90, 95], 100, Restart(4)),  # one is out of the window
        (DEAD, True, [1, 2, 3, 4, 5], 100, Restart(1)),  # all are
        (DEAD, True, [40, 50, 60], 100, GiveUp(fatal=False)),  # at its edge it is out, just inside it counts
        (OSError("no space"), False, [], 100, Restart(1)),
        (passing("no token"), False, [99], 100, Restart(2)),
        (ConfigError("x", "block_size"), False, [], 100, GiveUp(fatal=True)),
        (ModelError("x"), False, [], 100, GiveUp(fatal=True)),
        (UnsupportedModel("x"), False, [], 100, GiveUp(fatal=True)),
        (fatal("x"), False, [], 100, GiveUp(fatal=True)),
        (ModelError("x"), True, [99], 100, Restart(2)),  # it has loaded before: not the model's fault
        (ConfigError("memory"), True, [98, 99], 100, Restart(4)),
        (ConfigError("memory"), True, [97, 98, 99], 100, GiveUp(fatal=False)),
    ],
)
def test_after_a_failure(error: Exception, served: bool, restarts: list[float], now: float, decision: Restart | GiveUp):
    recovery = RecoveryConfig(engine_restarts=3, window_seconds=60.0 if 40 not in restarts else 60.5)
    assert after_failure(error, served=served, restarts=restarts, now=now, recovery=recovery) == decision


def test_no_restarts_at_all():
    recovery = RecoveryConfig(engine_restarts=0)
    assert after_failure(DEAD, served=True, restarts=[], now=0, recovery=recovery) == GiveUp(fatal=False)


def test_the_delay_is_bounded():
    recovery = RecoveryConfig(engine_restarts=100)
    assert after_failure(DEAD, served=True, restarts=[1.0] * 50, now=2, recovery=recovery) == Restart(60.0)


# ---- the report ----


@pytest.mark.parametrize(
    ("changes", "version"),
    [
        ({}, 1),
        ({"phase": "starting"}, 1),
        ({"ready": False, "healthy": True, "ranks": []}, 1),
        ({"phase": "loading"}, 2),
        ({"phase": "loading", "ready": True}, 2),
        ({"last_error": "x"}, 2),
        ({"progress": Progress(done=1, total=2)}, 2),
    ],
)
def test_a_version_is_a_change(changes: dict[str, Any], version: int):
    before = report()
    after = changed(before, **changes)
    assert after.version == version
    assert (after is before) == (version == 1)


def test_a_field_that_does_not_exist_is_a_fault():
    with pytest.raises(AssertionError, match="redy"):
        changed(report(), redy=True)


async def test_draining_is_for_good():
    state = ReportState(report(), lambda: 7)
    state.update(phase="draining", ready=False)
    state.update(phase="serving", ready=True, last_error="died")
    assert (state.report.phase, state.report.ready, state.report.last_error) == ("draining", False, "died")
    assert state.current().open_streams == 7


async def test_a_waiter_wakes_with_a_change_and_only_then():
    state = ReportState(report(), lambda: 0)
    waiter = asyncio.create_task(state.wait(after=1, incarnation="i", seconds=30))
    await asyncio.sleep(0)  # it waits now
    state.update(phase="starting")
    await asyncio.sleep(0)  # it would have woken
    assert not waiter.done()
    state.update(phase="loading")
    assert (await waiter).version == 2


@pytest.mark.parametrize(("after", "incarnation"), [(0, None), (-1, "i"), (1, "another"), (5, "another")])
async def test_news_are_told_at_once(after: int, incarnation: str | None):
    state = ReportState(report(), lambda: 0)
    async with asyncio.timeout(10):
        assert (await state.wait(after, incarnation, 30)).version == 1


@pytest.mark.parametrize("seconds", [0, 0.01, -5])
async def test_no_news_are_told_when_the_time_is_over(seconds: float):
    state = ReportState(report(), lambda: 0)
    async with asyncio.timeout(10):
        assert (await state.wait(1, "i", seconds)).version == 1


async def test_nobody_waits_for_what_has_ended():
    state = ReportState(report(), lambda: 0)
    waiter = asyncio.create_task(state.wait(1, None, 30))
    await asyncio.sleep(0)  # it waits now
    state.close()
    async with asyncio.timeout(10):
        await waiter
        await state.wait(1, None, 30)


# ---- progress ----


@pytest.mark.parametrize(
    ("began", "done", "total", "seconds", "left"),
    [
        (0, 50, 100, 10.0, 10.0),
        (50, 75, 100, 5.0, 5.0),
        (0, 100, 100, 10.0, 0.0),
        (0, 50, 100, 1.0, None),
        (0, 0, 100, 10.0, None),
        (50, 50, 100, 10.0, None),
        (0, 10, 0, 10.0, None),
    ],
)
def test_the_time_that_is_left(began: int, done: int, total: int, seconds: float, left: float | None):
    assert eta(began, done, total, seconds) == left


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("starting", "loading"),
        ("init", "loading"),
        ("load", "loading"),
        ("allocate", "loading"),
        ("warm up", "warming"),
        ("?", "loading"),
    ],
)
def test_the_engines_phases(name: str, phase: Phase):
    assert phase_of(Loading(name)) == phase


def test_progress_is_told_once_a_second_and_at_the_end():
    now = 0.0
    state = ReportState(report(), lambda: 0)
    teller = ProgressTeller(state, lambda: now)
    told = []
    for step in range(101):
        now = step / 20
        teller.tell("loading", step, 100)
        told.append(state.report.version)
    assert 5 <= len(set(told)) <= 8
    assert state.report.progress == Progress(done=100, total=100, eta_seconds=0.0)
    teller.tell("warming")
    assert (state.report.phase, state.report.progress) == ("warming", None)


# ---- what is refused ----


def test_every_engine_argument_is_one_of_the_possible(tmp_path: Path):
    args = engine_args(config(tmp_path, engine={"max_num_seqs": 4, "dtype": "float32"}, recovery={"progress_timeout_seconds": 7}))
    assert (args.max_num_seqs, args.dtype, args.progress_timeout, args.show_progress) == (4, "float32", 7, False)
    assert engine_args(config(tmp_path, engine={"kv_cpu_bytes": "4GiB"})).kv_cpu_bytes == 4 << 30
    assert "model" not in possible_names() and "block_size" in possible_names()


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"nonsense": 1}, ["engine.nonsense", "possible are", "block_size"]),
        ({"model": "x"}, ["engine.model", "model.source"]),
        ({"revision": "x"}, ["engine.revision", "hf://org/name@revision"]),
        ({"progress_timeout": 5}, ["engine.progress_timeout", "recovery.progress_timeout_seconds"]),
        ({"show_progress": True}, ["engine.show_progress"]),
        ({"max_num_seqs": "many"}, ["engine.max_num_seqs", "int", "str"]),
        ({"max_num_seqs": True}, ["engine.max_num_seqs"]),
        ({"kv_cpu_bytes": "4GX"}, ["engine.kv_cpu_bytes", "like 4GiB"]),
        ({"kv_cpu_bytes": 1.5}, ["engine.kv_cpu_bytes", "int", "float"]),
        ({"max_num_seqs": 0}, ["engine.max_num_seqs", "at least 1"]),
        ({"max_num_seqs": None}, ["engine.max_num_seqs"]),
        ({"block_size": 7}, ["engine.block_size", "16"]),
        ({"load_format": "pickle"}, ["engine.load_format"]),
        ({"tensor_parallel_size": 2}, ["engine.tensor_parallel_size", "layout.tensor"]),
        ({"data_parallel_size": 2}, ["engine.data_parallel_size", "layout.data"]),
        ({"enable_prefix_caching": "yes"}, ["engine.enable_prefix_caching", "bool"]),
    ],
)
def test_engine_arguments_that_cannot_be(engine: dict[str, Any], words: list[str], tmp_path: Path):
    bad = config(tmp_path).model_copy(update={"engine": engine})
    with pytest.raises(NodeFailure) as raised:
        engine_args(bad)
    assert raised.value.fatal
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"namespace": None}, ["namespace", "string"]),
        ({"model": {"served_names": []}}, ["model.served_names"]),
        ({"model": {"served_names": "x"}}, ["model.served_names", "list"]),
        ({"model": {"download_stall_seconds": 0}}, ["model.download_stall_seconds"]),
        ({"endpoint": {"port": "x"}}, ["endpoint.port", "integer"]),
        ({"endpoint": {"tls_cert_file": "/x"}}, ["endpoint.tls_key_file", "both"]),
        ({"recovery": {"engine_restarts": -1}}, ["recovery.engine_restarts"]),
        ({"recovery": {"progress_timeout_seconds": 0}}, ["recovery.progress_timeout_seconds"]),
        ({"recovery": {"window_seconds": 0}}, ["recovery.window_seconds"]),
        ({"schema_version": 2}, ["schema_version", "newer agent"]),
        ({"engine": []}, ["engine", "dictionary"]),
        ({"namespace": None, "service": 5}, ["namespace", "service", ";"]),
    ],
)
def test_fields_that_cannot_be(changes: dict[str, Any], words: list[str], tmp_path: Path):
    path = tmp_path / "agent.json"
    path.write_text(json.dumps(configuration(tmp_path, **changes)))
    read = read_configuration(path)
    assert read.config is None and read.admin.token_file
    assert all(word in (read.error or "") for word in words), read.error


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"admin": 5}', '{"admin": {"token_file": "t", "port": 70000}}'])
def test_files_that_cannot_be(content: str, tmp_path: Path):
    path = tmp_path / "agent.json"
    path.write_text(content)
    with pytest.raises(Unreadable, match=r"agent\.json"):
        read_configuration(path)
    with pytest.raises(Unreadable, match="cannot be read"):
        read_configuration(tmp_path / "absent")


def test_what_a_later_release_adds_is_ignored(tmp_path: Path):
    path = tmp_path / "agent.json"
    path.write_text(json.dumps(configuration(tmp_path, endpoint={"quic": True}, sorcery={"level": 9})))
    assert read_configuration(path).error is None


@pytest.mark.parametrize(
    ("pod", "layout", "words"),
    [
        ("g-0-0", {}, None),
        ("g-0-1", {}, "node 1 of group g-0, which has 1 nodes"),
        ("g-0-1", {"data": 2}, None),
        ("g-0-2", {"data": 2}, "node 2 of group g-0, which has 2 nodes"),
        ("g-0-1", {"data": 4, "per_node": 2}, None),
        ("g-0-0", {"tensor": 2, "per_node": 2}, None),
        ("g-0-0", {"tensor": 2, "pipeline": 2, "per_node": 4}, None),
        ("g-0-1", {"tensor": 2}, None),
        ("g-0-1", {"pipeline": 4, "per_node": 2}, None),
        ("g-0-0", {"data": 3, "per_node": 2}, "layout.per_node: .* divides the group's 3"),
        ("g-0-0", {"data": 2, "pipeline": 3, "tensor": 2, "per_node": 4}, "layout.per_node: must divide the 6 ranks"),
        ("g-0-0", {"per_node": 8}, "layout.per_node"),
        ("g-0-1", {"elastic": {"min": 1, "max": 2}}, None),
        ("g-0-2", {"elastic": {"min": 1, "max": 2}}, "has 2 nodes"),
        ("g-0-0", {"elastic": {"min": 1, "max": 2}, "per_node": 2}, r"\(data 1\), got 2"),
    ],
)
def test_layouts(pod: str, layout: dict[str, int], words: str | None, tmp_path: Path):
    answer = refusal(config(tmp_path, layout=layout), read_identity({"STARLING_POD_NAME": pod}))
    assert answer is None if words is None else re.search(words, answer or "")


@pytest.mark.parametrize("source", ["file://relative/path", "file://", "file:///no/such", "file:///etc/hostname", "file:///etc"])
def test_folders_that_are_no_checkpoint(source: str):
    with pytest.raises(NodeFailure, match=r"model\.source"):
        local_folder(source)


def test_a_folder(tmp_path: Path):
    assert local_folder(MODEL.as_uri()) == MODEL
    spaced = tmp_path / "a model"
    spaced.mkdir()
    (spaced / "config.json").write_text("{}")
    assert local_folder(spaced.as_uri()) == spaced


@pytest.mark.parametrize("source", ["org/name", "s3://bucket", "hf://", "hf://a/b/c", "hf://org/name@", "", "pvc://claim/x"])
async def test_sources_that_cannot_be(source: str, tmp_path: Path):
    model = config(tmp_path, model={"source": source}).model
    with pytest.raises(NodeFailure, match=r"model\.source: must be") as raised:
        await obtain(model, lambda *_: None, lambda _: None)
    assert raised.value.fatal


# ---- the rest ----


@pytest.mark.parametrize("phase", PHASES)
def test_each_phase_is_told_to_clients(phase: Phase):
    error = waiting_error(report(phase=phase, last_error="no such tensor"))
    assert error.status == 503 and phase in str(error)
    assert ("no such tensor" in str(error)) == (phase == "failed")


@pytest.mark.parametrize(("left", "wait"), [(None, "2"), (0.2, "1"), (7.2, "8"), (400.0, "30")])
def test_when_to_try_again(left: float | None, wait: str):
    error = waiting_error(report(phase="loading", progress=Progress(done=1, total=4, eta_seconds=left)))
    assert error.headers["Retry-After"] == wait and "25 %" in str(error)


@pytest.mark.parametrize(
    ("host", "tls", "url"),
    [
        ("0.0.0.0", False, "http://127.0.0.1:8000"),
        ("::", True, "https://127.0.0.1:8000"),
        ("10.0.0.7", False, "http://10.0.0.7:8000"),
        ("fd00::7", False, "http://[fd00::7]:8000"),
    ],
)
def test_where_it_reaches_itself(host: str, tls: bool, url: str):
    assert own_url(host, 8000, tls=tls) == url


def test_totals_go_on_and_gauges_do_not():
    past, now = Stats(running=3, steps_total=10, generated_tokens_total=5), Stats(running=1, steps_total=2)
    assert added(past, now) == Stats(running=1, steps_total=12, generated_tokens_total=5)
