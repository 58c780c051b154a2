"""The whole engine core over each family, against transformers: prompts in chunks, hits, preemption, and a CPU tier.

What families share, such as windows, latents or a state, has tests of its own, which go deeper; here are whole descriptions.
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from starling_engine.config import TiersConfig
from starling_engine.core.engine_core import EngineCore
from starling_engine.delta import Delta
from starling_engine.model_config.config import load_model_config
from starling_engine.params import SamplingParams
from starling_engine.request import EngineRequest

from tests.engine.checkpoints import FAMILIES, VARIANTS, VOCAB, Reference, write_checkpoint
from tests.engine.cores import TIE, core_for, run

STEPS = 40
LENGTH, LENGTH_WITH_STATE = 150, 300
"""Tokens of a prompt. Snapshots of a state are too far from each other for a shorter one."""
WINDOW = 100
"""A window of more than a chunk: what a tier holds of a window is whole chunks."""
ALL = {**VARIANTS, **FAMILIES}
ALWAYS = ("gemma3", "gpt-oss", "minicpm3")
"""Windows and soft caps, sinks, latents. All others take minutes."""


@pytest.fixture(params=[*ALWAYS, *(pytest.param(name, marks=pytest.mark.whole) for name in ALL if name not in ALWAYS)])
def reference(request: pytest.FixtureRequest, tmp_path: Path) -> Reference:
    folder, variant = tmp_path / "checkpoint", ALL[request.param]
    if variant.changes.get("sliding_window"):
        variant = replace(variant, changes={**variant.changes, "sliding_window": WINDOW})
    model = write_checkpoint(folder, variant)
    length = LENGTH_WITH_STATE if load_model_config(folder).has_state else LENGTH
    prompt = torch.randint(0, VOCAB, (1, length), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        whole = model.generate(prompt, max_new_tokens=STEPS, do_sample=False, eos_token_id=None)
        logits = model(whole).logits[0].float()
    return Reference(folder, prompt[0].tolist(), whole[0, length:].tolist(), logits)


def asked(reference: Reference, name: str, salt: str = "0") -> EngineRequest:
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    return EngineRequest(id=name, prompt_ids=reference.prompt, params=params, cache_salt=salt)


def assert_answered(found: tuple[list[int], str | None], reference: Reference) -> None:
    """Equal to transformers', or different first where its two best logits tie."""
    tokens, error = found
    assert error is None and len(tokens) == STEPS
    first = next((at for at, (ours, theirs) in enumerate(zip(tokens, reference.tokens, strict=True)) if ours != theirs), None)
    if first is not None:
        best, second = reference.logits[len(reference.prompt) + first - 1].topk(2).values.tolist()
        assert best - second < TIE, first


class BlocksWatched:
    """Takes the place of a core's `step`, and notes the most blocks that were used at once."""

    def __init__(self, core: EngineCore) -> None:
        self._core, self._step = core, core.step
        self.most = 0

    def __call__(self) -> list[Delta]:
        deltas = self._step()
        self.most = max(self.most, self._core.scheduler.kv.pool.num_used)
        return deltas


def test_tokens_are_those_of_transformers_whatever_is_cached(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five requests have room for not quite three: with full attention alone one of three is preempted as they grow.

    Windows, which give back what they have left, and states may have room where these have none, or take a snapshot's.
    """
    settings = {"budget": 48, "max_model_len": len(reference.prompt) + STEPS + 2}
    with core_for(reference.folder, kv_blocks=400, **settings) as core:
        monkeypatch.setattr(core, "step", watched := BlocksWatched(core))
        assert_answered(run(core, [asked(reference, "alone")])["alone"], reference)
        assert_answered(run(core, [asked(reference, "again")])["again"], reference)
        assert core.scheduler.stats.prefix_hits_total
        share = (3 * watched.most - 4) / core.scheduler.kv.pool.num_usable
        full = not load_model_config(reference.folder).has_state and all(
            not group.spec.window for group in core.scheduler.kv.groups
        )
    tiers = TiersConfig(cpu_bytes=32 << 20)
    with core_for(reference.folder, kv_blocks=math.ceil(400 * share), tiers=tiers, **settings) as core:
        names = [str(number) for number in range(5)]
        for found in run(core, [asked(reference, name, salt=name) for name in names]).values():
            assert_answered(found, reference)
        assert core.scheduler.stats.preemptions_total or not full
        core.scheduler.reset_device_cache()
        before = core.scheduler.snapshot().tiers["cpu"].loaded_bytes_total
        assert_answered(run(core, [asked(reference, "later", salt=names[-1])])["later"], reference)
        assert core.scheduler.snapshot().tiers["cpu"].loaded_bytes_total > before or not full
