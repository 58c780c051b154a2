"""What the scenarios are run against."""

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HARNESS = [sys.executable, str(ROOT / "e2e" / "cluster")]
OPERATOR_NAMESPACE = "starling-system"
NOT_OURS = "breaks a node, which only a cluster of our own is for"


@dataclass(frozen=True)
class ClusterUnderTest:
    """`folder` is the harness's, and None for a cluster that was there already: then no node can be broken."""

    kubeconfig: Path
    kubectl: str
    operator_image: str
    agent_image: str
    folder: Path | None

    def harness(self, *arguments: str) -> None:
        """A command of the harness on this cluster: `kill-kubelet N`, ..."""
        if self.folder is None:
            pytest.skip(NOT_OURS)
        command, *rest = arguments
        subprocess.run([*HARNESS, command, str(self.folder), *rest], check=True)

    def kill(self, pod_uid: str, word: str, how: signal.Signals = signal.SIGKILL) -> int:
        """Signals the pod's processes with `word` in their command line, as seen from the machine: how many there were.

        From inside, a container's first process cannot be killed.
        """
        if self.folder is None:
            pytest.skip(NOT_OURS)
        found = self.processes(pod_uid, word)
        for process in found:
            with contextlib.suppress(ProcessLookupError):  # a container ends with its first process
                os.kill(process, how)
        return len(found)

    def processes(self, pod_uid: str, word: str) -> list[int]:
        """Of a pod, those with `word` in their command line, by the machine's numbers; of another cluster none are seen."""
        processes = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [int(process.name) for process in processes if _is_of(process, pod_uid, word)]


def _is_of(process: Path, pod_uid: str, word: str) -> bool:
    try:
        cgroups = (process / "cgroup").read_text()
        command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return (pod_uid in cgroups or pod_uid.replace("-", "_") in cgroups) and word in command
