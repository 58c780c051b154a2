"""Architectures that other installed packages add, by entry points of the group `starling.models`.

An entry point's name is an architecture, its value the path of a ModelDefinition: `package.module:DEFINITION`. Each process looks
them up itself, so they are known wherever the package is installed.
"""

from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from starling_engine.errors import ModelPackageError
from starling_engine.model_config.definition import ModelDefinition

GROUP = "starling.models"


@cache
def plugins() -> dict[str, list[EntryPoint]]:
    """Returns the installed entry points by the architecture that they name. None is loaded yet."""
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, []).append(point)
    return found


@cache
def load_plugin(architecture: str) -> ModelDefinition:
    """Imports the definition that a package adds. Raises ModelPackageError naming the distribution and the entry point."""
    points = plugins()[architecture]
    if len(points) > 1:
        raise ModelPackageError(f"{_named(points)} name the same architecture; uninstall all but one")
    (point,) = points
    try:
        definition = point.load()
    except Exception as error:  # a package may raise whatever it wants when it is imported
        raise ModelPackageError(f"{_named(points)} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(definition, ModelDefinition):
        raise ModelPackageError(f"{_named(points)} must be a ModelDefinition, not a {type(definition).__name__}")
    if definition.architecture != architecture:
        raise ModelPackageError(f"{_named(points)} has another name than its definition: {definition.architecture}")
    return definition


def package_of(architecture: str) -> str | None:
    """Returns name and version of the package that adds an architecture; None for one of Starling's own."""
    points = plugins().get(architecture)
    return ", ".join(_distribution(point) for point in points) if points else None


def refuse_plugin(architecture: str) -> None:
    """Raises ModelPackageError if a package names this architecture, which Starling has itself."""
    points = plugins().get(architecture)
    if points:
        raise ModelPackageError(
            f"{_named(points)}: Starling has this architecture itself, and does not replace it; "
            "uninstall the package, or give its architecture a name of its own"
        )


def _named(points: Iterable[EntryPoint]) -> str:
    names = (f"{point.name} = {point.value} of {_distribution(point)}" for point in points)
    return f"entry point {' and '.join(names)} ({GROUP})"


def _distribution(point: EntryPoint) -> str:
    return "an unnamed distribution" if point.dist is None else f"{point.dist.name} {point.dist.version}"
