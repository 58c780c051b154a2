"""Python packages for a machine without network: fetched as wheels where there is one, installed there where missing.

usage: wheels.py fetch FOLDER | wheels.py install FOLDER TARGET
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

NEEDED = {
    "execnet": "execnet",
    "hypothesis": "hypothesis",
    "iniconfig": "iniconfig",
    "llguidance": "llguidance",
    "msgspec": "msgspec",
    "packaging": "packaging",
    "pluggy": "pluggy",
    "pygments": "pygments",
    "pytest": "pytest",
    "pytest-asyncio": "pytest_asyncio",
    "pytest-timeout": "pytest_timeout",
    "pytest-xdist": "xdist",
    "pyzmq": "zmq",
    "sortedcontainers": "sortedcontainers",
    "xxhash": "xxhash",
}
"""What the engine and its tests import besides what comes with torch and transformers: packages, and the module of each."""

PYTHON_VERSION = "3.12"
PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 26, 27, 28, 31)))
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def fetch(folder: Path) -> None:
    """Wheels for CPython 3.12 on x86-64 Linux, in the versions of constraints.txt."""
    options = ["--only-binary", ":all:", "--no-deps", "--implementation", "cp", "--python-version", PYTHON_VERSION]
    for platform in PLATFORMS:
        options += ["--platform", platform]
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", *options, "-d", str(folder), *pinned()], check=True)


def pinned() -> list[str]:
    """ "name==version" of each. Raises KeyError for one that constraints.txt does not have."""
    lines = (line.partition(";")[0].strip() for line in CONSTRAINTS.read_text().splitlines())
    versions = dict(line.split("==") for line in lines if "==" in line)
    return [f"{name}=={versions[name]}" for name in NEEDED]


def install(folder: Path, target: Path, needed: dict[str, str] = NEEDED) -> None:
    """Prints the folder that is to be on the path. SystemExit names what is neither here nor among the wheels."""
    sys.path.append(str(target))
    missing = [name for name, module in needed.items() if find_spec(module) is None]
    wheels = {name: next(folder.glob(f"{name.replace('-', '_')}-*.whl"), None) for name in missing}
    if unknown := [name for name, wheel in wheels.items() if wheel is None]:
        sys.exit(f"missing: {', '.join(unknown)}; `bench/gpu.sh --wheels` fetches them into {folder} where there is a network")
    if wheels:
        options = [
            "-q",
            "--no-index",
            "--no-deps",
            "--no-compile",
            "--disable-pip-version-check",
            "--root-user-action=ignore",
            "--target",
            str(target),
        ]
        subprocess.run(
            [sys.executable, "-m", "pip", "install", *options, *map(str, wheels.values())], check=True, stdout=sys.stderr
        )
    print(target.resolve())


if __name__ == "__main__":
    if sys.argv[1] == "fetch":
        fetch(Path(sys.argv[2]))
    else:
        install(Path(sys.argv[2]), Path(sys.argv[3]))
