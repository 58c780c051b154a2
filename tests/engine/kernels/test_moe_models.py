"""Whole models on the kernels for experts, routing and latents, against transformers' greedy tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from starling_engine.attention import mla_triton
from starling_engine.kernels import routing
from starling_engine.kernels.runs import INTERPRETED
from starling_engine.layers.experts_triton import TritonExperts
from starling_engine.params import SamplingParams
from starling_engine.platforms.cpu import CpuPlatform
from starling_engine.request import EngineRequest

from tests.engine.checkpoints import VARIANTS, make_reference
from tests.engine.cores import core_for, run

STEPS = 4
LATENT = ("attend_absorbed", "attend_expanded")


@pytest.mark.skipif(torch.cuda.is_available(), reason="these run on the engine's CPU platform, and the kernels are compiled here")
@pytest.mark.parametrize(("name", "latent"), [("qwen3-moe", ()), ("deepseek-v3", LATENT)])
def test_greedy_tokens_are_those_of_transformers(
    name: str, latent: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts in one step, one of which is expanded where the model has latents, then tokens one by one."""
    monkeypatch.setenv(INTERPRETED, "1")
    monkeypatch.setattr(CpuPlatform, "attention_backends", lambda _: ("triton", "torch"))
    monkeypatch.setattr(mla_triton, "SHORT", 8)
    used = set[str]()
    for owner, function in ((TritonExperts, "apply"), (routing, "route"), *((mla_triton, function) for function in LATENT)):
        monkeypatch.setattr(owner, function, told(getattr(owner, function), used))
    reference = make_reference(tmp_path, VARIANTS[name])
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    prompts = {"short": reference.prompt[:5], "whole": reference.prompt}
    with core_for(tmp_path) as core:
        results = run(core, [EngineRequest(id=key, prompt_ids=prompt, params=params) for key, prompt in prompts.items()])
    assert results["short"][1] is results["whole"][1] is None
    assert results["whole"][0] == reference.tokens[:STEPS]
    assert used == {"apply", "route", *latent}


def told(function: Callable[..., Any], used: set[str]) -> Callable[..., Any]:
    """The same function; its name is in `used` once it was called."""

    def called(*args: Any, **kwargs: Any) -> Any:
        used.add(function.__name__)
        return function(*args, **kwargs)

    return called
