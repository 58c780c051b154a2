"""What the chart renders to, without a cluster."""

import json
from typing import Any

import pytest
import typer
import yaml
from starling_cli.commands.operator import operator
from starling_operator.plan.observed import USUAL_SCRAPERS

from tests.charts.helm import CHART, ROOT, Helm, Manifest, the
from tests.charts.values import DIGEST, EVERYTHING, SETS

pytestmark = pytest.mark.timeout(120, func_only=True)


def _pod(objects: list[Manifest], component: str = "operator") -> dict[str, Any]:
    made = [item for item in objects if item["kind"] == "Deployment"]
    (found,) = [item for item in made if item["metadata"]["labels"]["app.kubernetes.io/component"] == component]
    spec: dict[str, Any] = found["spec"]["template"]["spec"]
    return spec


def _arguments(objects: list[Manifest]) -> list[str]:
    arguments: list[str] = _pod(objects)["containers"][0]["args"]
    return arguments


def _kinds(objects: list[Manifest]) -> set[str]:
    return {item["kind"] for item in objects}


def test_the_default_makes_one_operator_for_all_namespaces(helm: Helm) -> None:
    objects = helm.objects({})
    assert the(objects, "Deployment")["spec"]["replicas"] == 1
    assert _pod(objects)["containers"][0]["image"] == "starling-operator:0.1.0"
    assert "--agent-image=starling-agent:0.1.0" in _arguments(objects)
    assert not [item for item in _arguments(objects) if item.startswith("--namespace")]


@pytest.mark.parametrize("name", SETS)
def test_the_operator_is_restricted(helm: Helm, name: str) -> None:
    pod = _pod(helm.objects(SETS[name]))
    container = pod["containers"][0]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 10_000
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {probe: container[probe]["httpGet"]["port"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")} == {
        "startupProbe": "http",
        "livenessProbe": "http",
        "readinessProbe": "http",
    }


def test_a_platform_may_choose_all_users(helm: Helm) -> None:
    objects = helm.objects({"fixedUser": False, "mooncake": {"enabled": True}})
    assert "--no-fixed-user" in _arguments(objects)
    for pod in (_pod(objects), _pod(objects, "store")):
        assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def _images(helm: Helm, values: dict[str, Any]) -> str:
    return str(_pod(helm.objects(values), "store")["containers"][0]["image"])


def test_the_store_s_master_is_off_by_default_and_has_the_agent_s_image(helm: Helm) -> None:
    assert not [item for item in helm.objects({}) if "mooncake" in item["metadata"]["name"]]
    assert _images(helm, SETS["store"]) == "starling-agent:0.1.0"
    assert _images(helm, SETS["store"] | {"agent": EVERYTHING["agent"]}) == f"registry.example/ai/starling-agent@{DIGEST}"
    assert _images(helm, SETS["store-of-another-image"]) == "mooncake:0.3.13"


def test_services_reach_the_store_s_master_by_its_name(helm: Helm) -> None:
    from starling_crds.v1alpha1.engine import KVCacheSpec
    from starling_operator.plan.labels import AGENTS

    objects = helm.objects(SETS["store"])
    service = the(objects, "Service", "starling-mooncake")
    pod = next(item for item in objects if item["kind"] == "Deployment" and item["metadata"]["name"] == "starling-mooncake")
    labels = pod["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    ports = {port["name"]: port["containerPort"] for port in pod["spec"]["template"]["spec"]["containers"][0]["ports"]}
    assert ports == {port["name"]: port["port"] for port in service["spec"]["ports"]}
    KVCacheSpec.model_validate({"store": f"mooncake://{service['metadata']['name']}.starling-system:{ports['rpc']}"})
    policy = the(objects, "NetworkPolicy", "starling-mooncake")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    for values, namespace in (({}, "starling-system"), ({"servedNamespace": "blue"}, "blue")):
        policy = the(helm.objects({"mooncake": {"enabled": True, **values}}), "NetworkPolicy", "starling-mooncake")["spec"]
        named = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
        assert policy["ingress"][0]["from"] == [{"namespaceSelector": named, "podSelector": {"matchLabels": AGENTS}}]
    assert {port["port"] for port in policy["ingress"][0]["ports"]} == {"rpc", "metadata"}
    assert len(the(helm.objects(SETS["store-of-another-image"]), "NetworkPolicy", "birds-mooncake")["spec"]["ingress"]) == 1


def test_the_store_s_master_is_placed_like_the_operator(helm: Helm) -> None:
    values = SETS["store-of-another-image"]["mooncake"]
    objects = helm.objects(SETS["store-of-another-image"])
    pod = _pod(objects, "store")
    for field in ("nodeSelector", "tolerations", "affinity", "priorityClassName"):
        assert pod[field] == values[field]
        assert field not in _pod(helm.objects(SETS["store"]), "store")
    made = next(item for item in objects if item["kind"] == "Deployment" and item["metadata"]["name"] == "birds-mooncake")
    metadata = made["spec"]["template"]["metadata"]
    assert values["podLabels"].items() <= metadata["labels"].items() and metadata["annotations"] == values["podAnnotations"]


def test_the_store_s_master_is_scraped_with_the_operator(helm: Helm) -> None:
    objects = helm.objects(SETS["store-of-another-image"])
    monitor, service = the(objects, "ServiceMonitor", "birds-mooncake"), the(objects, "Service", "birds-mooncake")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert (
        not monitor["spec"]["selector"]["matchLabels"].items()
        <= the(objects, "Service", "birds-metrics")["metadata"]["labels"].items()
    )
    assert monitor["spec"]["endpoints"] == [{"port": "metrics", "interval": "15s"}]
    assert "metrics" in {port["name"] for port in service["spec"]["ports"]}
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    the(helm.objects(EVERYTHING), "ServiceMonitor")
    assert "ServiceMonitor" not in _kinds(helm.objects(SETS["store"]))


def test_what_needs_others_crds_is_off_by_default(helm: Helm) -> None:
    assert not _kinds(helm.objects({})) & {"ServiceMonitor", "PrometheusRule"}
    assert {"ServiceMonitor", "PrometheusRule", "ConfigMap"} <= _kinds(helm.objects(EVERYTHING))


def test_images_may_come_from_another_registry_and_by_digest(helm: Helm) -> None:
    objects = helm.objects(EVERYTHING)
    assert _pod(objects)["containers"][0]["image"] == "registry.example/ai/starling-operator:1.2.3"
    assert f"--agent-image=registry.example/ai/starling-agent@{DIGEST}" in _arguments(objects)


def test_the_crd_is_the_generated_one_and_outlives_the_release(helm: Helm) -> None:
    generated = {
        item["metadata"]["name"]: item for item in (yaml.safe_load(path.read_text()) for path in (ROOT / "crds").glob("*.yaml"))
    }
    rendered = {item["metadata"]["name"]: item for item in helm.objects({}) if item["kind"] == "CustomResourceDefinition"}
    assert (
        rendered.keys()
        == generated.keys()
        == {f"{plural}.serving.starling.dev" for plural in ("inferenceservices", "parallelismscales")}
    )
    for name, item in rendered.items():
        assert item["spec"] == generated[name]["spec"]
        assert item["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_the_crd_may_go_with_the_release_or_come_from_elsewhere(helm: Helm) -> None:
    goes = the(helm.objects({"crds": {"keep": False}}), "CustomResourceDefinition", "inferenceservices.serving.starling.dev")
    assert "helm.sh/resource-policy" not in goes["metadata"].get("annotations", {})
    assert "CustomResourceDefinition" not in _kinds(helm.objects({"crds": {"install": False}}))


def test_a_namespaced_install_needs_no_cluster_rights(helm: Helm) -> None:
    objects = helm.objects(SETS["no-cluster-rights"])
    assert not _kinds(objects) & {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"}
    assert the(objects, "Role", "starling-operator")["metadata"]["namespace"] == "blue"
    assert "--namespace=blue" in _arguments(objects)


def test_each_namespace_has_the_same_role(helm: Helm) -> None:
    everywhere = the(helm.objects({}), "ClusterRole", "starling-operator")["rules"]
    everywhere = [rule for rule in everywhere if rule["resources"] != ["nodes"]]  # no namespace has them
    roles = [item for item in helm.objects(SETS["two-namespaces"]) if item["metadata"]["name"] == "starling-operator"]
    assert {item["metadata"]["namespace"]: item["rules"] for item in roles if item["kind"] == "Role"} == {
        "blue": everywhere,
        "green": everywhere,
    }


def test_the_role_for_lease_and_key_stands_in_the_operators_namespace(helm: Helm) -> None:
    role = the(helm.objects(SETS["two-namespaces"]), "Role", "starling-operator-own")
    assert role["metadata"]["namespace"] == "starling-system"


def test_a_single_replica_blocks_no_drain_of_its_node(helm: Helm) -> None:
    assert "PodDisruptionBudget" not in _kinds(helm.objects({}))
    assert the(helm.objects({"replicas": 2}), "PodDisruptionBudget")["spec"]["minAvailable"] == 1


def test_names_follow_the_release(helm: Helm) -> None:
    assert the(helm.objects({}, release="prod"), "Deployment")["metadata"]["name"] == "prod-starling-operator"
    assert the(helm.objects({}, release="starling-2"), "Deployment")["metadata"]["name"] == "starling-2-operator"
    assert the(helm.objects(SETS["renamed"]), "Deployment")["metadata"]["name"] == "birds"


def test_pods_carry_the_labels_that_agents_let_in(helm: Helm) -> None:
    from starling_operator.plan.observed import Settings

    labels = the(helm.objects({}), "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert Settings(agent_image="any").operator_labels.items() <= labels.items()


def test_network_policy_follows_its_values(helm: Helm) -> None:
    policy = the(helm.objects(EVERYTHING), "NetworkPolicy")["spec"]
    assert policy["ingress"][0]["from"] == EVERYTHING["networkPolicy"]["metricsFrom"]
    assert [{"port": 16443, "protocol": "TCP"}] in [rule["ports"] for rule in policy["egress"]]
    asked = {
        rule["to"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]: rule
        for rule in policy["egress"]
        if "to" in rule
    }
    assert {name: rule["ports"][0]["port"] for name, rule in asked.items()} == {"agent": 8001, "router": 8000}
    assert the(helm.objects(SETS["metrics-for-nobody"]), "NetworkPolicy")["spec"]["ingress"] == []
    assert "NetworkPolicy" not in _kinds(helm.objects(SETS["no-network-policy"]))


def test_agents_let_in_who_the_values_name(helm: Helm) -> None:
    def named(values: dict[str, Any]) -> Any:
        (given,) = [one for one in _pod(helm.objects(values))["containers"][0]["args"] if one.startswith("--agent-metrics-from=")]
        return json.loads(given.partition("=")[2])

    assert named({}) == list(USUAL_SCRAPERS), "an operator without this chart lets in the same"
    assert named(EVERYTHING) == EVERYTHING["agent"]["metricsFrom"] and named({"agent": {"metricsFrom": []}}) == []


@pytest.mark.parametrize("text", ["monitoring", "{}", "[{}]", '["monitoring"]'])
def test_the_operator_starts_with_no_peer_that_no_policy_takes(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The API server would refuse the policies of all services."""
    with pytest.raises(typer.Exit):
        operator(agent_image="any", agent_metrics_from=text)
    assert "--agent-metrics-from must be a JSON list of NetworkPolicy peers" in capsys.readouterr().err


@pytest.mark.parametrize("name", SETS)
def test_the_operator_understands_its_arguments(helm: Helm, name: str) -> None:
    """Parsed by the command itself, which is not run."""
    app = typer.Typer()
    app.command()(operator)
    container = _pod(helm.objects(SETS[name]))["containers"][0]
    assert container["command"] == ["starling", "operator"]
    parsed = typer.main.get_command(app).make_context("operator", list(container["args"])).params
    assert list(parsed["namespace"] or []) == SETS[name].get("watchNamespaces", [])
    assert list(parsed["api_key_secret"] or []) == SETS[name].get("apiKeySecrets", ["starling-api-keys"])
    assert parsed["agent_image"].partition("@")[0].partition(":")[0].endswith("starling-agent")
    image = SETS[name].get("image", {})
    assert parsed["router_image_pull_policy"] == image.get("pullPolicy", "IfNotPresent")
    assert parsed["http_address"].rpartition(":")[2] == str(container["ports"][0]["containerPort"])


def test_people_get_rights_by_the_clusters_own_roles(helm: Helm) -> None:
    objects = helm.objects({})
    aggregated = {
        item["metadata"]["name"]: key.rpartition("-")[2]
        for item in objects
        if item["kind"] == "ClusterRole"
        for key in item["metadata"]["labels"]
        if key.startswith("rbac.authorization.k8s.io/")
    }
    assert aggregated == {"starling-admin": "admin", "starling-editor": "edit", "starling-viewer": "view"}


def test_the_notes_say_how_to_see_the_quickstart(helm: Helm) -> None:
    where = ("--namespace", "starling-system", "--dry-run=client")
    done = helm.run("install", "starling", CHART, *where, "--set", "watchNamespaces={blue}")
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    quickstart = yaml.safe_load((ROOT / "examples/quickstart.yaml").read_text())["metadata"]["name"]
    for command in (
        "kubectl -n starling-system rollout status deployment/starling-operator",
        "kubectl -n blue apply -f examples/quickstart.yaml",
        f"kubectl -n blue wait --for=condition=Ready infsvc/{quickstart}",
        f"kubectl -n blue port-forward service/{quickstart} 8000:80",
    ):
        assert command in notes


def test_the_operator_comes_before_what_it_serves(helm: Helm) -> None:
    """On a node and in the API server's queues; where it may not make what is of the whole cluster, it does without."""
    objects = helm.objects({})
    pod, made = _pod(objects), the(objects, "PriorityClass")
    assert pod["priorityClassName"] == made["metadata"]["name"] and made["value"] > 0
    assert pod["containers"][0]["resources"]["requests"]["cpu"] == "250m"
    schema, account = the(objects, "FlowSchema")["spec"], the(objects, "ServiceAccount")["metadata"]
    [rule] = schema["rules"]
    assert rule["subjects"][0]["serviceAccount"] == {"name": account["name"], "namespace": account["namespace"]}
    assert schema["priorityLevelConfiguration"]["name"] == "leader-election"
    assert _pod(helm.objects({"priorityClassName": "given"}))["priorityClassName"] == "given"
    assert not {"PriorityClass", "FlowSchema"} & {item["kind"] for item in helm.objects(SETS["no-cluster-rights"])}
