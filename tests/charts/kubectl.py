"""kubectl against the tests' API server."""

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from tests.charts.helm import Manifest

WAIT_SECONDS = 90
Question = tuple[str, str, str, str]
"""Namespace, API group, resource, verb."""


@dataclass(frozen=True, slots=True)
class Kubectl:
    """Calls fail the test with kubectl's own words."""

    command: tuple[str, ...]
    kubeconfig: Path

    def __call__(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Also what fails."""
        return self._run(arguments, None)

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

    def allowed(self, user: str, questions: list[Question]) -> list[bool]:
        """Whether `user` may do each of these, as the server itself judges."""
        columns = ("-o", 'jsonpath={.status.allowed}{"\\n"}')
        done = self._run(("create", *columns, "-f", "-"), [_review(user, question) for question in questions])
        assert done.returncode == 0, done.stderr
        return [line == "true" for line in done.stdout.split()]

    def until_allowed(self, user: str, questions: list[Question]) -> None:
        """Waits until the server knows each binding: it hears of them as others do, a moment later."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not all(answers := self.allowed(user, questions)):
            missing = [question for question, answer in zip(questions, answers, strict=True) if not answer]
            assert time.monotonic() < deadline, missing
            time.sleep(0.1)

    def until_served(self, *kinds: str) -> None:
        """Waits until the server has these kinds. `kubectl wait` fails for a definition that has no condition yet."""
        deadline = time.monotonic() + WAIT_SECONDS
        for kind in kinds:
            while (listed := self.run("get", kind, "--all-namespaces")).returncode:
                assert time.monotonic() < deadline, listed.stderr
                time.sleep(0.1)

    def may(self, user: str, *question: str) -> bool:
        namespace, group, resource, verb = question
        return self.allowed(user, [(namespace, group, resource, verb)])[0]

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


def _review(user: str, question: Question) -> Manifest:
    namespace, group, resource, verb = question
    plain, _, subresource = resource.partition("/")
    asked = {"namespace": namespace, "group": group, "resource": plain, "subresource": subresource, "verb": verb}
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": user, "groups": ["system:authenticated"], "resourceAttributes": asked},
    }
