"""kubectl, as a person at a terminal would call it. What is looked at again and again is asked for without it: each call takes an
eighth of a second of a processor, and the service that is waited for has only two.
"""

import functools
import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes import config
from urllib3.exceptions import HTTPError

Manifest = dict[str, Any]


LOOKED_AT = {"infsvc": "apis/serving.starling.dev/v1alpha1/{}/inferenceservices", "pod": "api/v1/{}/pods", "pods": "api/v1/{}/pods"}


class CallFailed(AssertionError):
    """A call that was refused, or had no answer: what waits for something looks again."""


@dataclass(frozen=True)
class Kubectl:
    """Calls `program` for one cluster and namespace."""

    program: str
    kubeconfig: Path
    namespace: str = "default"

    def __call__(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        done = subprocess.run(
            [self.program, f"--kubeconfig={self.kubeconfig}", "-n", self.namespace, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
        if check and done.returncode != 0:
            raise CallFailed(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def apply(self, *manifests: Manifest) -> None:
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifests)})
        self("apply", "-f", "-", stdin=text)

    def get(self, kind: str, name: str) -> Manifest:
        if kind in LOOKED_AT:
            return self._look(f"{LOOKED_AT[kind]}/{name}")
        found: Manifest = json.loads(self("get", kind, name, "-o", "json"))
        return found

    def find(self, kind: str, selector: str = "") -> list[Manifest]:
        if kind in LOOKED_AT:
            items: list[Manifest] = self._look(LOOKED_AT[kind], labelSelector=selector)["items"]
            return items
        found: list[Manifest] = json.loads(self("get", kind, "-o", "json", *(["-l", selector] if selector else [])))["items"]
        return found

    def _look(self, path: str, **query: str) -> Manifest:
        api, path = _api(self.kubeconfig), "/" + path.format(f"namespaces/{self.namespace}")
        asked = api.param_serialize("GET", path, query_params=list(query.items()), auth_settings=["BearerToken"])
        try:
            response = api.call_api(*asked)
            text = response.read()
        except HTTPError as error:
            raise CallFailed(f"GET {path}: {error}") from error
        if response.status != 200:
            raise CallFailed(f"GET {path}: {text.decode(errors='replace')}")
        found: Manifest = json.loads(text)
        return found

    def patch(self, kind: str, name: str, change: Manifest) -> None:
        self("patch", kind, name, "--type=merge", "-p", json.dumps(change))


@functools.cache
def _api(kubeconfig: Path) -> Any:
    return config.new_client_from_config(str(kubeconfig))


def condition(service: Manifest, kind: str) -> Manifest:
    """The condition of that type, or an empty one."""
    conditions: list[Manifest] = service.get("status", {}).get("conditions", [])
    return next((one for one in conditions if one["type"] == kind), {})


def wait_until(what: str, seen: Callable[[], bool], seconds: float, explain: Callable[[], str] = str) -> float:
    """Seconds that it took; fails with `explain()` when it has not come true in time. A call that fails has seen nothing yet."""
    began, failure = time.monotonic(), ""
    while True:
        try:
            if seen():
                return time.monotonic() - began
            failure = ""
        except CallFailed as failed:
            failure = f"\n{failed}"
        if time.monotonic() - began > seconds:
            raise AssertionError(f"not within {seconds} s: {what}{failure}\n{explain()}")
        time.sleep(0.2)
