"""Imports the kernels such that tests can run them: compiled where there is CUDA, else interpreted as numpy on CPU tensors."""

import importlib.util
import os
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starling_engine import kernels
from starling_engine.platforms.triton_support import INTERPRETED

from tests.engine.kernels.compiled import by_triton, compiled
from tests.engine.kernels.guarded import Watch, nothing_is_zero_by_chance

OTHER_TRITONS = ("3.6.0", "3.9.0")
"""Versions beside the pinned one by which kernels are compiled in a run of the whole: those of torch 2.11, and of 2.15."""

CACHE = Path(os.environ.get("STARLING_CACHE") or Path.home() / ".cache/starling")

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*"]


def import_kernels() -> None:
    """Triton decides at import whether a kernel is interpreted. Then the variable goes: other tests of the process live without it.

    Raises UsageError where a kernel, or Triton itself, was imported too early.
    """
    if not importlib.util.find_spec("triton"):
        return
    before = os.environ.get(INTERPRETED)
    if not torch.cuda.is_available():
        os.environ[INTERPRETED] = "1"
    try:
        for module in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
            _check(module.name)
        # What Triton imports at the first launch is decided by the same variable.
        for name in ("triton.language", "triton.experimental.gluon"):
            _check(name)
        _round_as_hardware()
    finally:
        os.environ.pop(INTERPRETED) if before is None else os.environ.update({INTERPRETED: before})


def _check(name: str) -> None:
    from triton.runtime import JITFunction

    compiled = [key for key, value in vars(importlib.import_module(name)).items() if isinstance(value, JITFunction)]
    if compiled and not torch.cuda.is_available():
        raise pytest.UsageError(f"{name} was imported without {INTERPRETED}=1 before these tests: {compiled[0]} is not interpreted")


def _round_as_hardware() -> None:
    """The interpreter cuts off what does not fit in bf16 or fp8, where hardware rounds to the nearest. It multiplies the bits of
    bf16 as if they were integers. Here torch converts, and products are of fp32."""
    from triton.language import float32
    from triton.runtime import interpreter

    names = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8e4nv": "float8_e4m3fn", "fp8e5": "float8_e5m2"}

    def convert(data: np.ndarray[Any, Any], source: Any, target: Any, _rounding: Any) -> np.ndarray[Any, Any]:
        exact = torch.from_numpy(np.array(data)).view(getattr(torch, names[source.name]))
        bits = getattr(torch, f"uint{target.primitive_bitwidth}")
        return exact.to(getattr(torch, names[target.name])).view(bits).numpy()

    def dot(_builder: Any, a: Any, b: Any, acc: Any, _precision: Any, _imprecise: Any) -> Any:
        left, right = (convert(x.data, x.dtype.scalar, float32, None).view(np.float32) for x in (a, b))
        return interpreter.TensorHandle(left @ right + acc.data, acc.dtype.scalar)

    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = dot


import_kernels()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeats tests that call `compiled` with each other Triton, which may have nothing in its cache yet.

    Those that call it by a helper of theirs are not found: a test calls it itself.
    """
    if metafunc.config.getoption("--whole") and compiled.__name__ in metafunc.function.__code__.co_names:
        others = [pytest.param(version, marks=pytest.mark.timeout(600)) for version in OTHER_TRITONS]
        metafunc.parametrize("triton", [None, *others], ids=["pinned", *OTHER_TRITONS], indirect=True)


@pytest.fixture(autouse=True, scope="module")
def triton(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """The version of Triton that compiles; None for the installed one, where a test is not repeated with others."""
    version: str | None = getattr(request, "param", None)
    if version is None:
        yield None
        return
    folder = CACHE / f"triton-{version}"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there; `make triton` installs it")
    with by_triton(folder):
        yield version


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU for the interpreter, CUDA where there is one; each test runs on one of them."""
    if (request.param == "cuda") != torch.cuda.is_available():
        pytest.skip("no CUDA device here" if request.param == "cuda" else "kernels are compiled where there is CUDA")
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Has kernels run between guards, in a random order, and on memory that is not zero by chance: see `guarded`."""
    found = Watch()
    if torch.cuda.is_available() or not importlib.util.find_spec("triton"):
        yield found
        return
    found.install(monkeypatch.setattr)
    with nothing_is_zero_by_chance():
        yield found
