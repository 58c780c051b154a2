"""kubectl against the tests' API server."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.charts.helm import Manifest


@dataclass(frozen=True, slots=True)
class Kubectl:
    """Calls fail the test with kubectl's own words."""

    command: tuple[str, ...]
    kubeconfig: Path

    def __call__(self, *arguments: str) -> str:
        done = self._run(arguments, None)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def apply(self, objects: list[Manifest]) -> None:
        done = self._run(("apply", "--server-side", "--force-conflicts", "-f", "-"), objects)
        assert done.returncode == 0, done.stderr

    def dry_run(self, objects: list[Manifest]) -> "subprocess.CompletedProcess[str]":
        """Everything that the server does for an apply but storing; fields that it does not know are refused."""
        return self._run(
            ("apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "-f", "-"), objects
        )

    def get(self, kind: str, name: str) -> Manifest:
        found: Manifest = json.loads(self("get", kind, name, "-o", "json"))
        return found

    def asker(self, user: str) -> Callable[[str, str, str, str], bool]:
        """A function (namespace, API group, resource, verb) that asks the server whether `user` may."""

        def may(namespace: str, group: str, resource: str, verb: str) -> bool:
            plain, _, subresource = resource.partition("/")
            asked = {"namespace": namespace, "group": group, "resource": plain, "subresource": subresource, "verb": verb}
            review = {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SubjectAccessReview",
                "spec": {"user": user, "groups": ["system:authenticated"], "resourceAttributes": asked},
            }
            done = self._run(("create", "-o", "json", "-f", "-"), [review])
            assert done.returncode == 0, done.stderr
            answer: Manifest = json.loads(done.stdout)
            return bool(answer["status"]["allowed"])

        return may

    def as_account(self, namespace: str, name: str, folder: Path) -> Path:
        """A kubeconfig of a ServiceAccount, written into `folder`."""
        path = folder / "kubeconfig"
        path.write_text(self("config", "view", "--raw", "--minify", "--flatten"))
        token = self("-n", namespace, "create", "token", name).strip()
        command = [self.command[0], f"--kubeconfig={path}", "config"]
        subprocess.run([*command, "set-credentials", "account", f"--token={token}"], check=True, capture_output=True)
        subprocess.run([*command, "set-context", "--current", "--user=account"], check=True, capture_output=True)
        return path

    def _run(self, arguments: tuple[str, ...], objects: list[Manifest] | None) -> "subprocess.CompletedProcess[str]":
        text = None if objects is None else "".join(f"---\n{json.dumps(item)}\n" for item in objects)
        command = [*self.command, *arguments]
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False)
