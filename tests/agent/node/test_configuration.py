"""Configurations that are refused, each with the field at fault."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from starling_agent.contract.config import AgentConfig
from starling_agent.contract.identity import read_identity
from starling_agent.node.configuration import layout_error, read_configuration
from starling_agent.node.engine_args import engine_args, possible_names
from starling_agent.node.failures import NodeFailure, Unreadable
from starling_agent.node.weights import local_model, obtain, weights_digest

from tests.agent.node.conftest import MODEL, configuration


def config(tmp_path: Path, **changes: Any) -> AgentConfig:
    return AgentConfig.model_validate(configuration(tmp_path, **changes))


def test_engine_arguments_are_passed_to_the_engine(tmp_path: Path):
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
def test_a_wrong_engine_argument_is_refused_and_named(engine: dict[str, Any], words: list[str], tmp_path: Path):
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
def test_a_wrong_field_is_refused_and_named(changes: dict[str, Any], words: list[str], tmp_path: Path):
    path = tmp_path / "agent.json"
    path.write_text(json.dumps(configuration(tmp_path, **changes)))
    read = read_configuration(path)
    assert read.config is None and read.admin.token_file
    assert all(word in (read.error or "") for word in words), read.error


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"admin": 5}', '{"admin": {"token_file": "t", "port": 70000}}'])
def test_a_file_without_a_valid_admin_part_is_unreadable(content: str, tmp_path: Path):
    path = tmp_path / "agent.json"
    path.write_text(content)
    with pytest.raises(Unreadable, match=r"agent\.json"):
        read_configuration(path)
    with pytest.raises(Unreadable, match="cannot be read"):
        read_configuration(tmp_path / "absent")


def test_fields_of_a_later_release_are_ignored(tmp_path: Path):
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
def test_a_layout_or_node_that_cannot_be_is_refused_with_the_reason(
    pod: str, layout: dict[str, int], words: str | None, tmp_path: Path
):
    answer = layout_error(config(tmp_path, layout=layout), read_identity({"STARLING_POD_NAME": pod}))
    assert answer is None if words is None else re.search(words, answer or "")


@pytest.mark.parametrize("source", ["file://relative/path", "file://", "file:///no/such", "file:///etc/hostname", "file:///etc"])
def test_a_folder_without_a_checkpoint_is_refused(source: str):
    with pytest.raises(NodeFailure, match=r"model\.source"):
        local_model(source)


def test_a_file_url_names_a_folder_or_a_gguf_file_also_with_spaces(tmp_path: Path):
    assert local_model(MODEL.as_uri()) == MODEL
    spaced = tmp_path / "a model"
    spaced.mkdir()
    (spaced / "config.json").write_text("{}")
    assert local_model(spaced.as_uri()) == spaced
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(NodeFailure, match=r"model\.source: .*model\.gguf: the header goes beyond the end") as raised:
        weights_digest(tmp_path / "model.gguf")
    assert raised.value.fatal
    assert local_model((tmp_path / "model.gguf").as_uri()) == tmp_path / "model.gguf"


def test_a_missing_part_of_a_model_is_named(tmp_path: Path):
    (tmp_path / "large-00001-of-00002.gguf").write_bytes(b"GGUF")
    with pytest.raises(NodeFailure, match=r"model\.source: .*cannot be read: .*large-00002-of-00002\.gguf") as raised:
        weights_digest(tmp_path / "large-00001-of-00002.gguf")
    assert raised.value.fatal


@pytest.mark.parametrize("source", ["org/name", "s3://bucket", "hf://", "hf://a/b/c", "hf://org/name@", "", "pvc://claim/x"])
async def test_a_malformed_model_source_is_refused(source: str, tmp_path: Path):
    model = config(tmp_path, model={"source": source}).model
    with pytest.raises(NodeFailure, match=r"model\.source: must be") as raised:
        await obtain(model, lambda *_: None, lambda _: None)
    assert raised.value.fatal
