"""The operator's image runs routers: all that they import is in its extras, and torch is not among it."""

import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.agent.conftest import REPOSITORY

IMPORTS = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in FORBIDDEN:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Missing())
import uvloop, starling_cli.main
from starling_agent import api_keys, file_token, logs, settings
from starling_engine.weights import hub
from starling_router import discovery, exact, hold_queue, picker, run
print(sorted(sys.modules.keys() & FORBIDDEN))
"""


def installed_with(*extras: str) -> set[str]:
    """Returns the distributions that `starling` with these extras brings, theirs included."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    found: set[str] = set()
    while wanted:
        requirement = Requirement(wanted.pop())
        name = canonicalize_name(requirement.name)
        if name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found.add(name)
            try:
                wanted += requires(name) or ()
            except PackageNotFoundError:
                continue
    return found


def test_all_that_a_router_imports_is_in_the_operators_image() -> None:
    there, modules = installed_with("operator", "router"), packages_distributions()
    forbidden = {name for name, owners in modules.items() if not {canonicalize_name(owner) for owner in owners} & there}
    forbidden = {name for name in forbidden if not name.startswith(("starling", "_", "pip", "setuptools"))}
    assert {"torch", "transformers", "numpy"} <= forbidden
    run = subprocess.run([sys.executable, "-c", f"FORBIDDEN = {forbidden!r}{IMPORTS}"], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "[]\n"), run.stderr
