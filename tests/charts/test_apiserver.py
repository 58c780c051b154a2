"""The chart on a real API server: its objects are valid, the operator may what it must, Helm upgrades and leaves the CRD."""

import time
from collections.abc import Callable

import pytest

from tests.charts.helm import ROOT, Helm, Manifest, parsed
from tests.charts.kubectl import WAIT_SECONDS, Kubectl
from tests.charts.test_rbac import USES, Right
from tests.charts.values import SETS

pytestmark = pytest.mark.timeout(120, func_only=True)

NAMESPACE, GROUP = "starling-system", "serving.starling.dev"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:starling-operator"


@pytest.fixture(scope="module")
def cluster(kubectl: Kubectl) -> Kubectl:
    """With the namespaces that the sets of values name, held to restricted pods, and the Prometheus operator's kinds."""
    for name in (NAMESPACE, "blue", "green"):
        kubectl.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": RESTRICTED}}])
    kubectl("apply", "-f", str(ROOT / "tests/charts/prometheus_operator.yaml"))
    kubectl.until_served("servicemonitors.monitoring.coreos.com", "prometheusrules.monitoring.coreos.com")
    return kubectl


@pytest.mark.parametrize("name", SETS)
def test_the_server_takes_every_object_without_a_warning(cluster: Kubectl, helm: Helm, name: str) -> None:
    done = cluster.dry_run(helm.objects(SETS[name]))
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


@pytest.mark.parametrize("name", SETS)
def test_the_pods_are_let_in_where_pods_are_restricted(cluster: Kubectl, helm: Helm, name: str) -> None:
    objects = helm.objects(SETS[name])
    templates = [item["spec"]["template"] for item in objects if item["kind"] == "Deployment"]
    # What is not in every cluster: priorities and accounts.
    accounts = [template["spec"].get("serviceAccountName", "default") for template in templates]
    made = [{"name": account, "namespace": NAMESPACE} for account in accounts]
    priorities = [item for item in objects if item["kind"] == "PriorityClass"]
    cluster.apply([*priorities, *({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata} for metadata in made)])
    own = [{"name": f"pod-{number}", "namespace": NAMESPACE} for number in range(len(templates))]
    pods = [{"apiVersion": "v1", "kind": "Pod", **t, "metadata": m} for t, m in zip(templates, own, strict=True)]
    done = cluster.dry_run(pods)
    assert done.returncode == 0, done.stderr


def test_the_plain_manifests_are_valid(cluster: Kubectl) -> None:
    done = cluster.dry_run(parsed((ROOT / "deploy/starling.yaml").read_text()))
    assert done.returncode == 0, done.stderr


BY_NAME: Right = ("", "secrets", "list")
"""Those with API keys, by their names alone (test_operator_rights)."""
NEEDED: list[Right] = [right for key, verbs in USES.items() for verb in verbs if (right := (*key, verb)) != BY_NAME]
FORBIDDEN: list[Right] = [
    ("", "pods", "create"),
    ("", "pods", "patch"),
    ("", "pods/exec", "create"),
    ("", "pods/log", "get"),
    *(("", "secrets", verb) for verb in ("get", "list", "watch", "patch", "delete")),
    ("", "serviceaccounts/token", "create"),
    ("", "serviceaccounts", "impersonate"),
    ("", "nodes", "patch"),
    ("", "namespaces", "list"),
    ("", "persistentvolumeclaims", "get"),
    ("apps", "deployments", "deletecollection"),
    ("apps", "daemonsets", "get"),
    ("apps", "statefulsets", "deletecollection"),
    ("rbac.authorization.k8s.io", "roles", "create"),
    ("rbac.authorization.k8s.io", "clusterroles", "escalate"),
    ("apiextensions.k8s.io", "customresourcedefinitions", "patch"),
    ("serving.starling.dev", "inferenceservices", "delete"),
    ("serving.starling.dev", "inferenceservices", "patch"),
    ("serving.starling.dev", "inferenceservices", "update"),
    ("coordination.k8s.io", "leases", "update"),
]


@pytest.fixture(scope="module")
def answers(cluster: Kubectl, helm: Helm) -> dict[Right, bool]:
    """What the operator's account may in a namespace, with the roles of the default installation."""
    cluster.apply([item for item in helm.objects({}) if item["apiVersion"].startswith("rbac.")])
    rights = [*NEEDED, *FORBIDDEN]

    def ask() -> dict[Right, bool]:
        return dict(zip(rights, cluster.allowed(ACCOUNT, [("default", *right) for right in rights]), strict=True))

    # The server hears of bindings as others do, a moment later.
    deadline = time.monotonic() + WAIT_SECONDS
    while not all(map((answers := ask()).get, NEEDED)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return answers


@pytest.mark.parametrize("right", NEEDED, ids="-".join)
def test_the_server_grants_every_use(answers: dict[Right, bool], right: Right) -> None:
    assert answers[right]


@pytest.mark.parametrize("right", FORBIDDEN, ids="-".join)
def test_the_server_grants_nothing_else(answers: dict[Right, bool], right: Right) -> None:
    assert not answers[right]


def test_a_namespaced_operator_may_nothing_elsewhere(cluster: Kubectl, helm: Helm) -> None:
    objects = helm.objects(SETS["two-namespaces"], release="few")
    cluster.apply([item for item in objects if item["apiVersion"].startswith("rbac.") and item["kind"].startswith("Role")])
    account = f"system:serviceaccount:{NAMESPACE}:few-starling-operator"
    assert _becomes(lambda: cluster.may(account, "blue", "apps", "statefulsets", "create"), wanted=True)
    assert _becomes(lambda: cluster.may(account, "green", "", "secrets", "create"), wanted=True)
    assert not cluster.may(account, "default", "apps", "statefulsets", "create")
    assert not cluster.may(account, NAMESPACE, "", "services", "list")
    assert not cluster.may(account, "", "", "services", "list")


@pytest.mark.parametrize("role, creates, reads", [("admin", True, True), ("edit", True, True), ("view", False, True)])
def test_the_clusters_own_roles_reach_services(cluster: Kubectl, helm: Helm, role: str, creates: bool, reads: bool) -> None:
    cluster.apply([item for item in helm.objects({}) if item["kind"] == "ClusterRole"])
    cluster.apply([_binding(role, "blue")])
    user = f"someone-with-{role}"
    # The controller that aggregates roles takes a moment.
    assert _becomes(lambda: cluster.may(user, "blue", GROUP, "inferenceservices", "get"), reads)
    assert _becomes(lambda: cluster.may(user, "blue", GROUP, "inferenceservices", "create"), creates)
    assert not cluster.may(user, "green", GROUP, "inferenceservices", "get")


def _binding(role: str, namespace: str) -> Manifest:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": role, "namespace": namespace},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": f"someone-with-{role}"}],
    }


def _becomes(ask: Callable[[], bool], wanted: bool) -> bool:
    deadline = time.monotonic() + WAIT_SECONDS
    while ask() is not wanted and time.monotonic() < deadline:
        time.sleep(0.2)
    return ask() is wanted


def test_helm_upgrades_the_crd_and_leaves_it_with_its_services(cluster: Kubectl, helm: Helm) -> None:
    crd = "inferenceservices.serving.starling.dev"
    chart, where = ROOT / "charts/starling", ("--namespace", "life", "--kubeconfig", cluster.kubeconfig)
    cluster("delete", "crd", "--ignore-not-found", crd, "parallelismscales.serving.starling.dev")  # another test's: not Helm's
    helm.must("install", "life", chart, *where, "--create-namespace")
    cluster.until_served(crd)
    cluster.apply([KEPT])

    # As an older release would have left it.
    cluster("patch", "crd", crd, "--type=json", "-p", '[{"op": "remove", "path": "/spec/names/shortNames"}]')
    helm.must("upgrade", "life", chart, *where, "--reset-then-reuse-values")
    assert cluster.get("crd", crd)["spec"]["names"]["shortNames"] == ["infsvc"]

    helm.must("uninstall", "life", *where)
    assert cluster.get(crd, "kept")["spec"]["model"]["source"] == SOURCE
    helm.must("install", "life", chart, *where)
    assert cluster.get(crd, "kept")["spec"]["model"]["source"] == SOURCE


SOURCE = "file:///models/any"
KEPT: Manifest = {
    "apiVersion": "serving.starling.dev/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "kept", "namespace": "default"},
    "spec": {"model": {"source": SOURCE}},
}
