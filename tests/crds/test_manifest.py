"""The CRD: generated, current, structural, described, and what the API server makes of it."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from starling_crds.manifest import PLURAL, crd_yaml, crds

from tests.crds.api import Api, Kubectl, Refusal
from tests.crds.bad import ALL
from tests.crds.conftest import CRD, FOLDER, SCALE_CRD
from tests.crds.manifests import service

TIER = "kvCache.tiers.filesystem"


def check(folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "starling_crds", "--check", folder], capture_output=True, text=True, check=False)


def test_the_files_are_what_the_types_say():
    assert {path.name for path in FOLDER.glob("*.yaml")} == crds().keys() == {CRD.name, SCALE_CRD.name}
    for name, crd in crds().items():
        assert (FOLDER / name).read_text() == crd_yaml(crd), "run: python -m starling_crds"
        assert yaml.safe_load(crd_yaml(crd)) == crd


def test_an_object_that_may_be_missing_has_no_default():
    """A service without spec.router would get routers."""
    spec = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    assert "default" not in spec["router"] and spec["router"]["properties"]["hold"]["default"]["seconds"] == 60
    assert "default" in spec["drain"]


def test_check_reports_a_file_that_is_not_current(tmp_path: Path):
    assert check(CRD.parent).returncode == 0
    (tmp_path / SCALE_CRD.name).write_text(SCALE_CRD.read_text())
    (tmp_path / CRD.name).write_text(CRD.read_text().replace("infsvc", "isvc"))
    done = check(tmp_path)
    assert done.returncode == 1
    assert "run: python -m starling_crds" in done.stderr


def fields(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from fields(child, f"{path}.{name}")
    if "items" in schema:
        yield from fields(schema["items"], f"{path}[]")


def all_fields() -> dict[str, dict[str, Any]]:
    return fields_of(CRD.name)


def fields_of(file: str) -> dict[str, Any]:
    root = crds()[file]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    return dict([*fields(root["spec"], "spec"), *fields(root["status"], "status")])


@pytest.mark.parametrize("file", [CRD.name, SCALE_CRD.name])
def test_each_field_is_described(file: str):
    bare = [path for path, schema in fields_of(file).items() if not schema.get("description") and not path.endswith("]")]
    assert bare == []


def test_the_schema_is_structural():
    text = json.dumps(crds())
    assert "$ref" not in text
    assert "anyOf" not in text
    assert "nullable" not in text


def test_integers_have_a_width():
    formats = {schema["format"] for schema in all_fields().values() if schema.get("type") == "integer"}
    assert formats == {"int32", "int64"}


def test_each_field_with_a_rule_has_a_bad_manifest():
    ruled = {
        (path + rule.get("fieldPath", "")).replace("[]", "[0]")
        for path, schema in all_fields().items()
        for rule in schema.get("x-kubernetes-validations", [])
        if "oldSelf" not in rule["rule"]
    }
    tried = {manifest.field.replace("[1]", "[0]") for manifest in ALL}
    assert sorted(ruled - tried) == []


def test_conditions_are_merged_by_key_and_groups_as_a_whole():
    """Groups have one writer; with a key the API server would note each field of each group a second time."""
    found = all_fields()
    assert found["status.conditions"]["x-kubernetes-list-map-keys"] == ["type"]
    assert not any(
        "x-kubernetes-list-map-keys" in found[path] for path in ("status.groups", "status.groups.nodes") if path in found
    )


@pytest.mark.parametrize("file", [CRD, SCALE_CRD], ids=lambda file: file.stem)
def test_the_api_server_has_no_warning(ctl: Kubectl, file: Path):
    done = ctl.run("apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", str(file))
    assert done.returncode == 0
    assert done.stderr == ""
    conditions = json.loads(ctl.output("get", "crd", file.stem, "-o", "json"))["status"]["conditions"]
    assert {condition["type"]: condition["status"] for condition in conditions}.get("NonStructuralSchema", "False") == "False"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("infsvc.spec.engine.blockSize", "Tokens in a block of the KV cache."),
        ("infsvc.spec.parallelism.elastic.min", "Smallest size"),
        ("infsvc.spec.template.spec.containers", "Merged by name with the operator's."),
        ("infsvc.status.groups.nodes.progress", "such as 3.2/7.6 GB"),
        ("infsvc.status.groups.operation.phase", "waiting (for pods), preparing, committing"),
        ("pscale.spec.replicas", "rounded up to the next that one can have"),
        ("pscale.status.target", "spec.replicas, rounded"),
    ],
)
def test_kubectl_explains(ctl: Kubectl, path: str, text: str):
    for _ in range(60):  # the API server publishes a new schema after some seconds
        done = ctl.run("explain", path)
        if done.returncode == 0:
            break
        time.sleep(0.5)
    assert text in " ".join(done.stdout.split())


@pytest.fixture
def scaled(api: Api) -> Iterator[str]:
    name = "scaled"
    api.create(service(name=name))
    yield name
    api.delete(name)


def test_scale_and_columns(ctl: Kubectl, scaled: str):
    ctl.output("scale", "infsvc", scaled, "--replicas=3")
    condition = {"type": "Ready", "status": "False", "reason": "Loading", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    status = {"replicas": 2, "selector": "a=b", "topology": "TP1 PP1 DP1", "url": "http://x", "conditions": [condition]}
    status |= {"canary": {"revision": "b", "stable": "a", "weight": 5}}
    ctl.output("patch", "infsvc", scaled, "--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))
    path = f"/apis/serving.starling.dev/v1alpha1/namespaces/default/{PLURAL}/{scaled}/scale"
    scale = json.loads(ctl.output("get", "--raw", path))
    assert scale["spec"] == {"replicas": 3}
    assert scale["status"] == {"replicas": 2, "selector": "a=b"}
    assert f"inferenceservice.serving.starling.dev/{scaled}" in ctl.output("get", "starling", "-o", "name")
    head, row = ctl.output("get", "infsvc", "-o", "wide").splitlines()
    assert head.split() == ["NAME", "READY", "REASON", "REPLICAS", "TOPOLOGY", "CANARY", "URL", "AGE"]
    assert row.split()[:9] == [scaled, "False", "Loading", "2", "TP1", "PP1", "DP1", "5", "http://x"]
    assert "URL" not in ctl.output("get", "infsvc")


def test_the_status_is_a_subresource(api: Api, scaled: str):
    stored = api.check(service(name=f"{scaled}-2") | {"status": {"replicas": 5}})
    assert not isinstance(stored, Refusal)
    assert "replicas" not in stored["status"]


def test_kubectl_refuses_what_is_unknown(ctl: Kubectl):
    manifest = json.dumps(service({"engine.blocksize": 8}))
    done = ctl.run("apply", "--validate=strict", "--dry-run=server", "-f", "-", stdin=manifest)
    assert done.returncode != 0
    assert 'unknown field "spec.engine.blocksize"' in done.stderr


@pytest.mark.parametrize("change", [{"path": "/other"}, {"path": None, "claim": "kv"}], ids=["path", "claim"])
def test_the_folder_of_a_tier_stays(api: Api, change: dict[str, Any]):
    name = "tiered"
    made = api.create(service({TIER: {"bytes": "1Gi", "path": "/kv"}}, name=name))
    try:
        tier = made["spec"]["kvCache"]["tiers"]["filesystem"]
        changed = {key: value for key, value in (tier | change).items() if value is not None}
        made["spec"]["kvCache"]["tiers"]["filesystem"] = changed
        refusal = api.replace(made)
        assert isinstance(refusal, Refusal)
        assert "cannot change, because blocks in the old place would stay behind" in refusal.fields[f"spec.{TIER}.path"]
        made["spec"]["kvCache"]["tiers"] = {}
        assert not isinstance(api.replace(made), Refusal)
    finally:
        api.delete(name)


def scale_of(replicas: Any, name: str = "sized") -> dict[str, Any]:
    return {
        "apiVersion": "serving.starling.dev/v1alpha1",
        "kind": "ParallelismScale",
        "metadata": {"name": name},
        "spec": {"replicas": replicas},
    }


@pytest.mark.parametrize(
    ("replicas", "says"),
    [
        (0, "should be greater than or equal to 1"),
        (-1, "should be greater than or equal to 1"),
        (4097, "should be less than or equal to 4096"),
        ("two", "must be of type integer"),
        (1.5, "must be of type integer"),
        (None, "Required value"),
    ],
)
def test_a_size_that_nothing_can_have_names_what_is_possible(api: Api, replicas: Any, says: str):
    refusal = api.check(scale_of(replicas))
    assert isinstance(refusal, Refusal)
    assert says in refusal.fields["spec.replicas"]


def test_unknown_fields_of_a_size_are_refused(api: Api):
    body = scale_of(2)
    body["spec"]["size"] = 3
    refusal = api.check(body)
    assert isinstance(refusal, Refusal)
    assert 'unknown field "spec.size"' in refusal.message


def test_kubectl_scales_a_size(api: Api, ctl: Kubectl):
    api.create(scale_of(2))
    try:
        ctl.output("scale", "pscale", "sized", "--replicas=4")
        status = {"replicas": 2, "selector": "a=b", "unit": "expert", "target": 4}
        ctl.output("patch", "pscale", "sized", "--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))
        path = "/apis/serving.starling.dev/v1alpha1/namespaces/default/parallelismscales/sized/scale"
        scale = json.loads(ctl.output("get", "--raw", path))
        assert (scale["spec"], scale["status"]) == ({"replicas": 4}, {"replicas": 2, "selector": "a=b"})
        head, row = ctl.output("get", "pscale").splitlines()
        assert head.split() == ["NAME", "UNIT", "DESIRED", "TARGET", "EFFECTIVE", "READY", "AGE"]
        assert row.split()[:5] == ["sized", "expert", "4", "4", "2"]
        refused = ctl.run("scale", "pscale", "sized", "--replicas=0")
        assert refused.returncode != 0
        assert "spec.replicas" in refused.stderr
    finally:
        ctl.output("delete", "pscale", "sized")
