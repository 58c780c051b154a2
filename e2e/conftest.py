"""The cluster that the scenarios run on: one of our own for each worker, made and taken down here, or that of --kubeconfig."""

import itertools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.service.kubectl import Kubectl, wait_until
from e2e.under_test import HARNESS, OPERATOR_NAMESPACE, ROOT, ClusterUnderTest

_numbers = itertools.count(1)
GANG_PATIENCE = 30
"""Seconds; by default a scenario would wait for five minutes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("starling")
    group.addoption("--kubeconfig", help="run on this cluster instead of making one; its nodes must have the images")
    group.addoption("--operator-image", default="localhost/starling-operator:thin", help="image of the operator, repository:tag")
    group.addoption("--disturbances", type=float, metavar="SECONDS", help="how long test_disturbances.py goes on")
    group.addoption("--disturbances-seed", type=int, default=1, help="the order of test_disturbances.py")
    group.addoption("--disturbances-streams", type=int, default=64, metavar="N", help="streams at once in test_disturbances.py")
    group.addoption("--agent-image", default="localhost/starling-agent:thin", help="image of the agent, repository:tag")


LONGEST = ("test_images.py", "test_faults.py", "test_router.py", "test_zero.py", "test_life.py", "test_groups.py")
"""Files that begin, so that neither worker is alone with one at the end. Images come first: to download gigabytes is to wait."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with the longest files; the others follow in their order."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[ClusterUnderTest]:
    option = request.config.getoption
    images = (option("--operator-image"), option("--agent-image"))
    given = option("--kubeconfig") or os.environ.get("STARLING_E2E_KUBECONFIG")
    if given:
        kubectl = shutil.which("kubectl")
        assert kubectl, "--kubeconfig needs kubectl on the PATH"
        yield ClusterUnderTest(Path(given), kubectl, *images, None)
        return
    # Sockets below it have short names only, so not in pytest's own folder.
    folder = Path(tempfile.mkdtemp(prefix="starling-e2e-"))
    try:
        subprocess.run([*HARNESS, "up", str(folder), "--nodes", "2", "--owner", str(os.getpid())], check=True)
        yield ClusterUnderTest(folder / "kubeconfig", str(folder / "bin" / "kubectl"), *images, folder)
    finally:
        subprocess.run([*HARNESS, "down", str(folder)], check=True)


@pytest.fixture(scope="session")
def helm() -> str:
    """Helm's path; built into the cache the first time."""
    done = subprocess.run([*HARNESS, "helm"], check=True, capture_output=True, text=True)
    return done.stdout.split()[-1]


def image_values(prefix: str, image: str) -> list[str]:
    repository, _, tag = image.rpartition(":")
    return [f"--set={prefix}.repository={repository}", f"--set-string={prefix}.tag={tag}"]


@pytest.fixture(scope="session")
def operator(cluster: ClusterUnderTest, helm: str) -> str:
    """The chart, installed as a user installs it; its namespace."""
    command = [
        *(helm, "upgrade", "--install", "starling", str(ROOT / "charts" / "starling")),
        *("--kubeconfig", str(cluster.kubeconfig), "--namespace", OPERATOR_NAMESPACE, "--create-namespace"),
        *image_values("image", cluster.operator_image),
        *image_values("agent.image", cluster.agent_image),
        *("--set", "replicas=2", "--set", f"gangPatienceSeconds={GANG_PATIENCE}", "--wait", "--timeout", "3m"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stderr}\n{_why(cluster)}"
    return OPERATOR_NAMESPACE


def _why(cluster: ClusterUnderTest) -> str:
    command = [cluster.kubectl, f"--kubeconfig={cluster.kubeconfig}", "-n", OPERATOR_NAMESPACE, "get", "pods", "-o", "json"]
    pods = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["items"]
    states = [pod["status"].get("containerStatuses") or pod["status"].get("conditions") for pod in pods]
    return json.dumps(states, indent=1)[:4000]


@pytest.fixture
def kubectl(cluster: ClusterUnderTest, operator: str, request: pytest.FixtureRequest) -> Iterator[Kubectl]:
    """In a namespace of the test's own."""
    del operator  # it has to run, nothing more
    yield from namespace(cluster, request.session)


@pytest.fixture(scope="module")
def shared_kubectl(cluster: ClusterUnderTest, operator: str, request: pytest.FixtureRequest) -> Iterator[Kubectl]:
    """In a namespace of the file's own, for what its tests share."""
    del operator
    yield from namespace(cluster, request.session)


def namespace(cluster: ClusterUnderTest, session: pytest.Session) -> Iterator[Kubectl]:
    """One that enforces restricted Pod Security; gone afterwards, and told of when something has failed."""
    name = f"e2e-{next(_numbers)}"
    anywhere = Kubectl(cluster.kubectl, cluster.kubeconfig)
    anywhere("create", "namespace", name)
    anywhere("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    own = Kubectl(cluster.kubectl, cluster.kubeconfig, name)
    # A controller makes it, a moment later; without it pods are refused.
    wait_until("there is an account for pods", lambda: bool(own.get("serviceaccount", "default")), 60)
    failed_before = session.testsfailed
    yield own
    if session.testsfailed > failed_before:
        print(own("get", "all,infsvc,events", "-o", "wide", check=False))
    anywhere("delete", "namespace", name, "--wait=false")
