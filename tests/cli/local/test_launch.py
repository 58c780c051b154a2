"""A StatefulSet's template becomes a process of this machine."""

import base64
import hashlib
import json
import sys
import tempfile
from pathlib import Path

import pytest
from starling_agent.contract.config import AgentConfig
from starling_agent.contract.identity import read_identity
from starling_cli.local.launch import PodPlacement, launch, unused_here
from starling_cli.local.sources import PathMap
from starling_cli.local.volumes import LaunchError, Objects

from tests.cli.local.manifests import children, service


@pytest.fixture
def start(tmp_path):
    """Launches the first pod of a spec."""

    def start(secrets=(), maps=(), **spec):
        (group,) = children("StatefulSet", **spec).values()
        secret_objects = {**children("Secret", **spec), **dict(secrets)}
        for secret in secret_objects.values():
            if secret.get("data", {}).get("token"):
                secret["data"]["token"] = base64.b64encode(b"hidden").decode()
        objects = Objects(secret_objects, children("ConfigMap", **spec), "service.yaml")
        folder = tmp_path / "pod"
        folder.mkdir(exist_ok=True)
        front, leader = "http://127.0.0.1:8000", "127.0.0.1:18001"
        place = PodPlacement(folder, tmp_path / "scratch", tmp_path / "weights", 18000, 18001, front, leader, maps)
        return launch(f"{group['metadata']['name']}-0", "uid", group, objects, place)

    return start


def config_of(launched):
    return AgentConfig.model_validate_json(Path(launched.command[-1]).read_text())


def test_the_command_is_this_installations(start):
    assert start().command[:5] == (sys.executable, "-m", "starling_cli.main", "agent", "--config")


def test_addresses_and_ports_are_this_machines(start):
    config = config_of(start())
    assert (config.endpoint.host, config.endpoint.port) == ("127.0.0.1", 18000)
    assert (config.admin.host, config.admin.port) == ("127.0.0.1", 18001)
    assert config.endpoint.service_url == "http://127.0.0.1:8000"
    assert start().environment["STARLING_LEADER"] == "127.0.0.1:18001"


def test_the_rest_of_the_configuration_stays(start):
    config = config_of(start(engine={"maxSequences": 7}, drain={"seconds": 33}))
    assert config.engine["max_num_seqs"] == 7
    assert config.drain.seconds == 33
    assert config.model.served_names == ["chat"]


def test_the_admin_token_is_known(start):
    launched = start()
    assert launched.token == "hidden"
    assert Path(config_of(launched).admin.token_file).read_text() == "hidden"


def test_both_hashes_are_known(start):
    launched = start()
    (config_map,) = children("ConfigMap").values()
    assert launched.cluster_config_hash == hashlib.sha256(config_map["data"]["agent.json"].encode()).hexdigest()
    assert launched.config_hash == hashlib.sha256(Path(launched.command[-1]).read_bytes()).hexdigest()


def test_the_pod_knows_who_it_is(start):
    identity = read_identity(start().environment)
    assert (identity.namespace, identity.node, identity.address) == ("team", 0, "127.0.0.1")
    assert identity.pod == f"{identity.group}-0"


def test_the_users_home_is_kept_and_variables_are_passed(start):
    template = {"spec": {"containers": [{"name": "agent", "env": [{"name": "COLOUR", "value": "red"}]}]}}
    environment = start(template=template).environment
    assert environment["COLOUR"] == "red"
    assert "HOME" not in environment


def test_downloads_are_kept_beyond_the_run(start, tmp_path):
    assert config_of(start()).model.cache_dir == str(tmp_path / "weights")
    assert config_of(start(model={"cache": {"claim": "shared"}})).model.cache_dir == str(tmp_path / "weights")


def test_a_folder_for_the_cache_is_used_as_it_is(start, tmp_path):
    folder = str(tmp_path / "here" / "weights")
    assert config_of(start(model={"cache": {"hostPath": folder}})).model.cache_dir == folder


def tiers(**place):
    return {"tiers": {"cpu": {"bytes": "1Gi"}, "filesystem": {"bytes": "2Gi", **place}}}


def test_a_folder_for_kept_kv_is_made_and_used(start, tmp_path):
    engine = config_of(start(kvCache=tiers(path=str(tmp_path / "on" / "node")))).engine
    assert (engine["kv_cpu_bytes"], engine["kv_fs_bytes"]) == (1 << 30, 2 << 30)
    assert engine["kv_fs_path"] == str(tmp_path / "on" / "node")
    assert (tmp_path / "on" / "node").is_dir()


def test_a_folder_of_responses_is_used(start, tmp_path):
    launched = start(endpoint={"responseStore": {"path": str(tmp_path / "responses")}})
    assert config_of(launched).endpoint.response_store == str(tmp_path / "responses" / "team" / "chat")
    assert config_of(start()).endpoint.response_store is None


@pytest.mark.parametrize(("place", "prefix"), [({"path": "/var/kv"}, "/var/kv"), ({"claim": "kv"}, "pvc://kv")])
def test_a_folder_for_kept_kv_may_be_mapped(start, tmp_path, place, prefix):
    launched = start(kvCache=tiers(**place), maps=(PathMap(prefix, tmp_path / "kept"),))
    assert config_of(launched).engine["kv_fs_path"] == str(tmp_path / "kept")


def test_a_file_source_is_mapped(start, tmp_path):
    (tmp_path / "m" / "small").mkdir(parents=True)
    launched = start(model={"source": "file:///opt/m/small"}, maps=(PathMap("/opt/m", tmp_path / "m"),))
    assert config_of(launched).model.source == f"file://{tmp_path}/m/small"


def test_a_source_below_tmp_is_this_machines(start):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        assert config_of(start(model={"source": f"file://{folder}"})).model.source == f"file://{folder}"


def test_a_claim_is_mapped(start, tmp_path):
    (tmp_path / "m" / "small").mkdir(parents=True)
    launched = start(model={"source": "pvc://weights/small"}, maps=(PathMap("pvc://weights", tmp_path / "m"),))
    assert config_of(launched).model.source == f"file://{tmp_path}/m/small"


def test_a_claim_without_a_folder_is_refused(start):
    with pytest.raises(LaunchError, match="--map pvc://weights=FOLDER"):
        start(model={"source": "pvc://weights/small"})


def secret(name, **content):
    return {name: {"kind": "Secret", "metadata": {"name": name}, "stringData": content}}


def test_api_keys_come_from_the_files_secret(start):
    endpoint = {"apiKeySecret": {"name": "clients", "key": "keys"}}
    launched = start(endpoint=endpoint, secrets=secret("clients", keys="one\ntwo\n"))
    key_file = config_of(launched).endpoint.api_key_file
    assert key_file is not None
    assert Path(key_file).read_text() == "one\ntwo\n"
    assert Path(key_file).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("secrets", [{}, secret("clients", other="x")])
def test_a_missing_secret_or_key_is_named(start, secrets):
    with pytest.raises(LaunchError, match=r"clients|keys"):
        start(endpoint={"apiKeySecret": {"name": "clients", "key": "keys"}}, secrets=secrets)


def test_a_hub_token_comes_from_the_files_secret(start):
    model = {"tokenSecret": {"name": "hub", "key": "token2"}}
    assert start(model=model, secrets=secret("hub", token2="hf_x")).environment["HF_TOKEN"] == "hf_x"
    with pytest.raises(LaunchError, match=r"env\[HF_TOKEN\]: Secret 'hub' is not in service.yaml"):
        start(model=model)


def test_volumes_of_the_overlay(start, tmp_path):
    overlay = {
        "spec": {
            "volumes": [{"name": "data", "hostPath": {"path": str(tmp_path)}}],
            "containers": [
                {
                    "name": "agent",
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                    "env": [{"name": "DATA", "value": "/data/x"}],
                }
            ],
        }
    }
    assert start(template=overlay).environment["DATA"] == f"{tmp_path}/x"


def test_a_volume_that_only_a_cluster_has_is_refused(start):
    overlay = {
        "spec": {
            "volumes": [{"name": "data", "nfs": {"server": "x", "path": "/"}}],
            "containers": [{"name": "agent", "volumeMounts": [{"name": "data", "mountPath": "/data"}]}],
        }
    }
    with pytest.raises(LaunchError, match=r"volumes\[data\]: nfs is not possible here"):
        start(template=overlay)


MODEL = {"source": "hf://org/name"}


def test_unused_fields_are_named():
    overlay = {
        "spec": {
            "nodeSelector": {"a": "b"},
            "containers": [{"name": "agent", "resources": {}, "env": []}, {"name": "helper"}],
        }
    }
    rollout = {"canary": {"steps": [{"weight": 5}]}}
    rest = {"image": "registry/image", "template": overlay, "scaling": {"idleSeconds": 60}, "rollout": rollout}
    assert unused_here(service(**rest).spec) == [
        "spec.image",
        "spec.template.spec.nodeSelector",
        "spec.template.spec.containers[agent].resources",
        "spec.template.spec.containers[helper]",
        "spec.scaling.idleSeconds",
        "spec.rollout.canary",
    ]
    assert unused_here(service().spec) == []


def test_the_files_of_a_pod_are_json(start):
    json.loads(Path(start().command[-1]).read_text())
