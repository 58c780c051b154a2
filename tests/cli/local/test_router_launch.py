"""The Deployment of routers becomes a process of this machine."""

import base64
import sys
from pathlib import Path

import pytest
from starling_cli.local.launch import unused_here
from starling_cli.local.observe import observe
from starling_cli.local.router_launch import router_launch
from starling_cli.local.routers import LocalRouter
from starling_cli.local.volumes import LaunchError, Objects
from starling_operator.plan.observed import Settings
from starling_operator.plan.plan import plan
from starling_router.tenants import read_tenants

from tests.cli.local.manifests import children, service

KEYS = {"metadata": {"name": "keys"}, "data": {"k": base64.b64encode(b"secret\n").decode()}}


def planned(**spec):
    """Returns the Deployment and the Secret of what runs here."""
    seen = observe(service(**spec), {}, (), (), Settings(agent_image="image"), "here", 1.0, b"key")
    decision = plan(seen)
    (deployment,) = [made for made in decision.apply if made["kind"] == "Deployment"]
    return deployment, {made["metadata"]["name"]: made for made in decision.create if made["kind"] == "Secret"}


@pytest.fixture
def start(tmp_path):
    def start(secrets=(), **spec):
        deployment, own = planned(**{"router": {}, **spec})
        pod = LocalRouter("chat-router-1", "chat-router", "u", "1", 0, tmp_path, tmp_path / "scratch", tmp_path / "log", 18000)
        objects = Objects({**own, **dict(secrets)}, {}, "service.yaml")
        return router_launch(deployment, objects, pod, tmp_path / "backends")

    return start


def flags(launched):
    return dict(flag.split("=", 1) for flag in launched.command[4:])


def test_addresses_and_backends_are_this_machines(start, tmp_path):
    launched = start()
    assert launched.command[:4] == (sys.executable, "-m", "starling_cli.main", "router")
    here = {"--host": "127.0.0.1", "--port": "18000", "--backends-file": str(tmp_path / "backends")}
    assert here.items() <= flags(launched).items()
    assert not {"--backends-service", "--backends-port"} & flags(launched).keys()


def test_policy_hold_and_drain_are_those_of_the_spec(start):
    router = {"policy": {"load": 0.5}, "hold": {"requests": 5, "bytes": "1Mi", "seconds": 7}}
    launched = start(router=router, drain={"acceptSeconds": 20, "seconds": 33})
    wanted = {"--load-weight": "0.5", "--hold-requests": "5", "--hold-bytes": "1048576", "--hold-seconds": "7"}
    assert wanted.items() <= flags(launched).items()
    assert (flags(launched)["--accept-seconds"], flags(launched)["--drain-seconds"]) == ("0.5", "33")
    assert launched.grace_seconds > 33


def test_its_token_and_keys_are_files_of_its_folder(start, tmp_path):
    launched = start({"keys": KEYS}, endpoint={"apiKeySecret": {"name": "keys", "key": "k"}})
    token, keys = (Path(flags(launched)[name]) for name in ("--router-token-file", "--api-key-file"))
    assert token.is_relative_to(tmp_path) and len(token.read_text()) == 64
    assert token.stat().st_mode & 0o077 == 0
    assert keys.read_text() == "secret\n"


def test_tenants_and_their_keys_are_files_of_its_folder(start, tmp_path):
    keys = {"metadata": {"name": "keys"}, "stringData": {"chat": "one", "other": "of no tenant"}}
    tenants = [{"name": "chat", "priority": 2, "seesAll": True}, {"name": "batch"}]
    launched = start({"keys": keys}, router={"tenants": tenants, "tenantKeysSecret": "keys"})
    file = Path(flags(launched)["--tenants-file"])
    assert file.is_relative_to(tmp_path)
    read = [(tenant.name, tenant.priority, tenant.sees_all) for tenant in read_tenants(file)]
    assert read == [("chat", 2, True), ("batch", 0, False)]
    assert {each.name: each.read_text() for each in (file.parent / "keys").iterdir()} == {"chat": "one"}
    start({"keys": keys | {"stringData": {"batch": "two"}}}, router={"tenants": tenants, "tenantKeysSecret": "keys"})
    assert {each.name: each.read_text() for each in (file.parent / "keys").iterdir()} == {"batch": "two"}, "one was taken back"


def test_a_secret_that_is_missing_is_named(start):
    with pytest.raises(LaunchError, match=r"Secret 'keys' is not in service\.yaml"):
        start(endpoint={"apiKeySecret": {"name": "keys", "key": "k"}})


def test_one_router_is_enough():
    assert children("Deployment", router={"replicas": 3})["chat-router"]["spec"]["replicas"] == 3
    assert planned(router={"replicas": 3})[0]["spec"]["replicas"] == 1


def test_a_machine_has_no_gateway():
    """A router that reads its backends from a file refuses the port for gateways, which know backends by their addresses."""
    route = {"parentRefs": [{"name": "edge"}], "backend": "InferencePool", "failureMode": "FailOpen"}
    deployment, _ = planned(router={}, endpoint={"route": route})
    assert "epp" not in str(deployment)
    assert unused_here(service(router={}, endpoint={"route": route}).spec) == ["spec.endpoint.route"]


@pytest.mark.parametrize(
    ("spec", "unused"),
    [
        ({}, []),
        ({"replicas": 1}, []),
        ({"replicas": 2, "resources": {}}, ["spec.router.replicas", "spec.router.resources"]),
        ({"tolerations": [], "nodeSelector": {"a": "b"}}, ["spec.router.nodeSelector", "spec.router.tolerations"]),
    ],
)
def test_what_a_process_does_not_need_is_named_where_it_was_written(spec, unused):
    assert unused_here(service(router=spec).spec) == unused
