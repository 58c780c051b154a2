"""A whole model on the kernels for experts, routing and latents, against transformers' greedy tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from starling_engine.attention import mla_triton
from starling_engine.kernels import routing
from starling_engine.layers.experts_triton import TritonExperts
from starling_engine.params import SamplingParams
from starling_engine.platforms.interpreted import InterpretedPlatform
from starling_engine.platforms.triton_support import INTERPRETED
from starling_engine.request import EngineRequest
from starling_engine.worker import worker
from starling_engine.worker.device import graphs

from tests.engine.checkpoints import PROMPT, VARIANTS, make_reference
from tests.engine.cores import core_for, run

STEPS = 3
LATENT = ("attend_absorbed", "attend_expanded")


@pytest.mark.skipif(torch.cuda.is_available(), reason="these put their tensors on the CPU, and the kernels are compiled here")
@pytest.mark.whole  # a minute; each of its kernels has tests of its own
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs as on a GPU, with recorded steps whose padding goes to no expert.

    The whole prompt comes in a step without a recording, in the expanded form. A short one follows beside its first token, then
    tokens one by one.
    """
    monkeypatch.setenv(INTERPRETED, "1")
    monkeypatch.setattr(worker, "select_platform", lambda *_: InterpretedPlatform())
    monkeypatch.setattr(graphs, "decode_sizes", lambda _: [3])
    monkeypatch.setattr(graphs, "draft_sizes", lambda _: [])
    monkeypatch.setattr(graphs, "mixed_sizes", lambda _: [8])
    monkeypatch.setattr(mla_triton, "SHORT", 8)
    used = set[str]()
    for owner, function in ((TritonExperts, "apply"), (routing, "route"), *((mla_triton, function) for function in LATENT)):
        monkeypatch.setattr(owner, function, spied(getattr(owner, function), used))
    idle = watch_idle(monkeypatch)
    reference = make_reference(tmp_path, VARIANTS["deepseek-v3"])
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    prompts = {"whole": reference.prompt, "short": reference.prompt[:5]}
    with core_for(tmp_path, budget=PROMPT) as core:
        results = run(core, [EngineRequest(id=key, prompt_ids=prompt, params=params) for key, prompt in prompts.items()])
    assert results["short"][1] is results["whole"][1] is None
    assert results["whole"][0] == reference.tokens[:STEPS]
    assert used == {"apply", "route", *LATENT}
    assert (False, False, True) in idle, "two requests in a step of three"
    assert (False,) * 6 + (True,) * 2 in idle, "a prompt of five and a token in a step of eight"
    assert (False,) * PROMPT in idle


def watch_idle(monkeypatch: pytest.MonkeyPatch) -> set[tuple[bool, ...]]:
    """Records, for each call of the experts, which tokens go to none of them."""
    apply, seen = TritonExperts.apply, set[tuple[bool, ...]]()

    def watched(self: TritonExperts, x: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        seen.add(tuple((slots == self.shape.num_slots).all(-1).tolist()))
        return apply(self, x, slots, weights)

    monkeypatch.setattr(TritonExperts, "apply", watched)
    return seen


def spied(function: Callable[..., Any], used: set[str]) -> Callable[..., Any]:
    """The same function; its name is in `used` once it was called."""

    def called(*args: Any, **kwargs: Any) -> Any:
        used.add(function.__name__)
        return function(*args, **kwargs)

    return called
