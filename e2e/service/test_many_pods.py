"""Many pods in one service: its status stays small and calm. tests/operator/shell/test_many_pods.py has thousands."""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.service.conftest import MakeService
from e2e.service.kubectl import Kubectl, Manifest, wait_until

pytestmark = pytest.mark.timeout(300)
PODS = 200
NOWHERE = {"spec": {"nodeSelector": {"kubernetes.io/hostname": "nowhere"}}}


def test_a_status_of_many_pods_is_small_and_written_once_a_second(service: MakeService, kubectl: Kubectl, tmp_path: Path) -> None:
    watched, pods = tmp_path / "watched.json", f"/api/v1/namespaces/{kubectl.namespace}/pods?limit=1"
    command = [kubectl.program, f"--kubeconfig={kubectl.kubeconfig}", "-n", kubectl.namespace, "get", "infsvc", "--watch"]
    with watched.open("w") as file, subprocess.Popen([*command, "-o", "json", "--show-managed-fields"], stdout=file) as watch:
        began = time.monotonic()
        chat = service(parallelism={"tensor": PODS}, template=NOWHERE)

        def all_are_there() -> bool:
            return json.loads(kubectl("get", "--raw", pods))["metadata"].get("remainingItemCount") == PODS - 1

        wait_until("all pods are there", all_are_there, 120, lambda: json.dumps(chat.now["status"]))
        wait_until("the status says why none starts", lambda: "Unschedulable" in json.dumps(chat.now["status"]), 30)
        seconds = time.monotonic() - began
        watch.terminate()
    versions = {each["metadata"]["resourceVersion"]: each for each in objects(watched.read_text())}
    size = max(len(json.dumps(each, separators=(",", ":"))) for each in versions.values())
    print(f"{PODS} pods after {seconds:.0f} s: {len(versions)} versions of the service, of at most {size} bytes")
    assert 3 < len(versions) <= seconds + 5, "what readers wait for is written at once"
    assert size < 256 * 1024


def objects(text: str) -> Iterator[Manifest]:
    """Yields what kubectl has written, but for an end that is cut."""
    decoder, at = json.JSONDecoder(), 0
    while (start := text.find("{", at)) >= 0:
        try:
            found, at = decoder.raw_decode(text, start)
        except json.JSONDecodeError:
            return
        yield found
