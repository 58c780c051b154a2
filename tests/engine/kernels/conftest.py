"""Imports the kernels such that tests can run them: compiled where there is CUDA, else interpreted as numpy on CPU tensors."""

import importlib.util
import os
import pkgutil

import pytest
import torch
from starling_engine import kernels
from starling_engine.kernels.runs import INTERPRETED

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*"]


def import_kernels() -> None:
    """Triton decides at import whether a kernel is interpreted. The variable goes again: other tests of the process live without it.

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
        _check("triton.language")
    finally:
        os.environ.pop(INTERPRETED) if before is None else os.environ.update({INTERPRETED: before})


def _check(name: str) -> None:
    from triton.runtime import JITFunction

    compiled = [key for key, value in vars(importlib.import_module(name)).items() if isinstance(value, JITFunction)]
    if compiled and not torch.cuda.is_available():
        raise pytest.UsageError(f"{name} was imported without {INTERPRETED}=1 before these tests: {compiled[0]} is not interpreted")


import_kernels()


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU for the interpreter, CUDA where there is one; each test runs on one of them."""
    if (request.param == "cuda") != torch.cuda.is_available():
        pytest.skip("no CUDA device here" if request.param == "cuda" else "kernels are compiled where there is CUDA")
    return torch.device(request.param)
