"""Calls of the API server, like `kubectl apply` (strict about fields that are not known), but without its start-up."""

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starling_crds.manifest import GROUP, PLURAL, SCALE_KIND, SCALE_PLURAL, VERSION


@dataclass(frozen=True)
class Kubectl:
    command: tuple[str, ...]

    def run(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self.command, *arguments], input=stdin, capture_output=True, text=True, check=False)

    def output(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout


def installed(ctl: Kubectl, file: Path) -> None:
    """Forced, for a test before this one may have installed it in another way."""
    done = ctl.run("apply", "--server-side", "--force-conflicts", "--field-manager=tests-crds", "-f", str(file))
    assert done.returncode == 0, done.stderr
    ctl.output("wait", "--for=condition=Established", "crd", file.stem, "--timeout=30s")


@dataclass(frozen=True)
class Refusal:
    """field -> what the API server says about it; the whole message where it names none (fields that are not known)."""

    fields: dict[str, str]
    message: str


class Api:
    """Nothing that is created here stays, unless `create` is asked for."""

    def __init__(self, kubeconfig: Path) -> None:
        from kubernetes import client, config

        self._objects = client.CustomObjectsApi(config.new_client_from_config(str(kubeconfig)))
        self._failure = client.ApiException
        self._until_served()

    def check(self, body: dict[str, Any]) -> Refusal | dict[str, Any]:
        """A dry run: the object as it would be stored, or why not."""
        try:
            return self._create(body, dry_run="All")
        except self._failure as error:
            return _refusal(error)

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        return self._create(body)

    def replace(self, body: dict[str, Any]) -> Refusal | dict[str, Any]:
        try:
            made: dict[str, Any] = self._objects.replace_namespaced_custom_object(
                GROUP, VERSION, "default", _plural(body), body["metadata"]["name"], body
            )
        except self._failure as error:
            return _refusal(error)
        return made

    def delete(self, name: str) -> None:
        self._objects.delete_namespaced_custom_object(GROUP, VERSION, "default", PLURAL, name)

    def _create(self, body: dict[str, Any], **options: str) -> dict[str, Any]:
        made: dict[str, Any] = self._objects.create_namespaced_custom_object(
            GROUP, VERSION, "default", _plural(body), body, field_validation="Strict", **options
        )
        return made

    def _until_served(self) -> None:
        """A CRD is served a moment after it is Established."""
        for _ in range(100):
            try:
                self._objects.list_namespaced_custom_object(GROUP, VERSION, "default", PLURAL)
                return
            except self._failure:
                time.sleep(0.1)
        raise AssertionError("the API server does not serve InferenceServices")


def _plural(body: dict[str, Any]) -> str:
    return SCALE_PLURAL if body["kind"] == SCALE_KIND else PLURAL


def _refusal(error: Any) -> Refusal:
    status = json.loads(error.body)
    causes = (status.get("details") or {}).get("causes") or []
    fields: dict[str, str] = {}
    for cause in causes:
        fields[cause.get("field", "")] = f"{fields.get(cause.get('field', ''), '')} {cause['message']}".strip()
    return Refusal(fields, status["message"])
