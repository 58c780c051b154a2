"""The CRDs of the Gateway API and of its Inference Extension, as their projects publish them: files of Go modules."""

import json
import subprocess
from pathlib import Path

from starling_cluster import go_builds
from starling_cluster.errors import HarnessError

FILES = {
    "sigs.k8s.io/gateway-api@v1.4.1": "config/crd/standard/gateway.networking.k8s.io_httproutes.yaml",
    "sigs.k8s.io/gateway-api-inference-extension@v1.2.1": "config/crd/bases/inference.networking.k8s.io_inferencepools.yaml",
}
"""The file of a kind that a service's route is made of, by its module and version."""


def download() -> list[Path]:
    """Paths of the files, in Go's module cache: at once when they are there."""
    go_builds.need_go()
    command = ["go", "mod", "download", "-json", *FILES]
    done = subprocess.run(command, cwd=go_builds.SOURCES, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HarnessError(f"go mod download ended with status {done.returncode}: {done.stderr or done.stdout}")
    found, decoder, text = {}, json.JSONDecoder(), done.stdout.strip()
    while text:
        module, end = decoder.raw_decode(text)
        found[f"{module['Path']}@{module['Version']}"] = Path(module["Dir"])
        text = text[end:].lstrip()
    return [found[module] / file for module, file in FILES.items()]
