"""One InferenceService as a user sees it: applied, waited for, asked, changed."""

import itertools
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from e2e.service.kubectl import Kubectl, Manifest, condition, wait_until

MODEL = "file:///opt/starling/models/starling-pydoc"
ENGINE = {"kvMemory": "64Mi", "maxSequences": 16, "maxBatchedTokens": 512, "extraArgs": {"num_threads": 1}}
TRAFFIC = Path(__file__).with_name("traffic.py")
TOKENS = 48
"""Of each answer of the traffic."""
SCRAPE = "import httpx; print(httpx.get('http://127.0.0.1:8000/metrics', timeout=10).text)"
_numbers = itertools.count(1)
SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@dataclass(frozen=True)
class Watched:
    """`name` in kubectl's namespace."""

    kubectl: Kubectl
    name: str

    def apply(self, **spec: Any) -> None:
        """The spec that every scenario starts from, with the given fields on top."""
        base: Manifest = {"model": {"source": MODEL}, "engine": ENGINE, "drain": {"acceptSeconds": 3, "seconds": 30}}
        manifest = {
            "apiVersion": "serving.starling.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": self.name},
            "spec": {**base, **spec},
        }
        self.kubectl.apply(manifest)

    def patch(self, **spec: Any) -> None:
        self.kubectl.patch("infsvc", self.name, {"spec": spec})

    @property
    def now(self) -> Manifest:
        return self.kubectl.get("infsvc", self.name)

    def is_true(self, kind: str) -> bool:
        """The condition, as of the generation that is there now."""
        service = self.now
        found = condition(service, kind)
        return found.get("status") == "True" and found.get("observedGeneration") == service["metadata"]["generation"]

    def wait_ready(self, seconds: float = 180) -> float:
        return wait_until(f"{self.name} is Ready", lambda: self.is_true("Ready"), seconds, self.explain)

    @property
    def ready_since(self) -> str:
        return str(condition(self.now, "Ready")["lastTransitionTime"])

    def wait_lost(self, since: str) -> None:
        """Until it is not Ready, or Ready since another time: a short outage may be over between two looks."""

        def lost() -> bool:
            return not self.is_true("Ready") or self.ready_since != since

        wait_until(f"{self.name} is not Ready", lost, 60, self.explain)

    def wait_said(self, words: str, seconds: float = 150) -> None:
        """The status says it while it is so; who starts again at once may do so between two looks, and has it in its log."""

        def said() -> bool:
            return words in self.explain() or any(words in self._log(pod) for pod in self.pods())

        wait_until(f"it says {words!r}", said, seconds, self.explain)

    def _log(self, pod: Manifest) -> str:
        return self.kubectl("logs", pod["metadata"]["name"], "-c", "agent", check=False)

    def pods(self) -> list[Manifest]:
        return self.kubectl.find("pods", f"serving.starling.dev/service={self.name}")

    def explain(self) -> str:
        pods = [
            (pod["metadata"]["name"], pod["status"].get("phase"), pod["status"].get("containerStatuses")) for pod in self.pods()
        ]
        return json.dumps([self.now.get("status"), pods], indent=1)

    @property
    def url(self) -> str:
        """Of the API inside the cluster, as the status tells users."""
        return str(self.now["status"]["url"])


def run_in(kubectl: Kubectl, pod: str, script: str, *arguments: str) -> str:
    """Output of a Python program in an agent's pod."""
    return kubectl("exec", pod, "-c", "agent", "--", "python", "-c", script, *arguments)


def metric(kubectl: Kubectl, pod: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels, as that pod says it."""
    families = text_string_to_metric_families(run_in(kubectl, pod, SCRAPE))
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


class HelperPod:
    """A pod of the test's own, which is none of the service's. Its `files` are in /files."""

    def __init__(
        self,
        kubectl: Kubectl,
        name: str,
        image: str,
        command: list[str],
        files: dict[str, str],
        *,
        labels: dict[str, str] | None = None,
        env: dict[str, str] | None = None,
        probe: Manifest | None = None,
    ) -> None:
        self._kubectl, self.name = kubectl, name
        container = {
            "name": "main",
            "image": image,
            "command": command,
            "env": [{"name": key, "value": value} for key, value in (env or {}).items()],
            "volumeMounts": [{"name": "files", "mountPath": "/files"}],
            "securityContext": SECURITY,
            # Without it the processors are its own only when nobody else wants them: a client stands still for seconds.
            "resources": {"requests": {"cpu": "200m"}},
            **({"readinessProbe": {"httpGet": probe, "periodSeconds": 1}} if probe is not None else {}),
        }
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels or {}},
            "spec": {
                "restartPolicy": "Never",
                # A node that is emptied must not empty itself of who watches it.
                "tolerations": [{"key": "maintenance", "operator": "Exists"}],
                "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
                "containers": [container],
                "volumes": [{"name": "files", "configMap": {"name": name}}],
            },
        }
        kubectl.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": files}, pod)

    @property
    def status(self) -> Manifest:
        found: Manifest = self._kubectl.get("pod", self.name)["status"]
        return found

    def wait_ready(self) -> None:
        pod = partial(self._kubectl.get, "pod", self.name)
        wait_until(f"{self.name} is ready", lambda: condition(pod(), "Ready").get("status") == "True", 60, self.log)

    def log(self) -> str:
        """Returns what it has said so far; nothing while it does not run yet."""
        return self._kubectl("logs", self.name, check=False)

    def reaches(self, address: str, port: int) -> bool:
        """Says whether it gets a connection."""
        ask = f"import socket; print(socket.socket().connect_ex(({address!r}, {port})) == 0)"
        timed = f"import socket; socket.setdefaulttimeout(3); {ask}"
        return self._kubectl("exec", self.name, "--", "python", "-c", timed).strip() == "True"

    def runs(self, program: str, *arguments: str) -> str:
        """Output of a Python program in it."""
        return self._kubectl("exec", self.name, "--", "python", "-c", program, *arguments).strip()


class Traffic(HelperPod):
    """A pod that streams completions from a service, one after another; by way of another `url`, if one is given."""

    def __init__(
        self,
        kubectl: Kubectl,
        service: Watched,
        image: str,
        *,
        streams: int = 2,
        tokens: int = TOKENS,
        model: str = "",
        key: str = "none",
        url: str = "",
    ) -> None:
        command = ["python", "/files/traffic.py", url or service.url, model or service.name, str(streams), str(tokens)]
        name, files = f"traffic-{next(_numbers)}", {"traffic.py": TRAFFIC.read_text()}
        super().__init__(kubectl, name, image, command, files, env={"OPENAI_API_KEY": key})

    def requests(self) -> list[Manifest]:
        """Returns what it has seen so far, one record a request; none while it does not run yet."""
        return records(self.log())

    def wait_for_more(self, count: int, seconds: float = 150) -> None:
        """Until `count` more requests have ended."""
        before = len(self.requests())
        wait_until(
            f"{count} more requests", lambda: len(self.requests()) >= before + count, seconds, lambda: str(self.requests()[-3:])
        )

    def close(self) -> None:
        """It begins no other stream."""
        self.runs("import os; os.kill(1, 15)")

    def stop(self) -> list[Manifest]:
        """Ends it when its open streams have ended; all its records."""
        self.close()

        def phase() -> str:
            return str(self.status["phase"])

        wait_until("the traffic has ended", lambda: phase() in ("Succeeded", "Failed"), 150)
        return all_records(phase(), self._kubectl("logs", self.name))


def records(log: str) -> list[Manifest]:
    """Returns the records in a log of traffic.py, which has other lines only where the program itself fails."""
    return [json.loads(line) for line in log.splitlines() if line.startswith("{")]


def all_records(phase: str, log: str) -> list[Manifest]:
    """Returns the records of traffic that has ended: one that died, or asked nothing, would else have no failure to show."""
    found = records(log)
    assert phase == "Succeeded" and found, f"the traffic ended as {phase}, with {len(found)} records: {log[-2000:]}"
    return found


def failures(requests: list[Manifest]) -> list[Manifest]:
    return [request for request in requests if request["error"] is not None]
