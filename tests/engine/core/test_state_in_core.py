"""The whole engine core over models with a recurrent state, against transformers: snapshots, hits, preemption, and layouts."""

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from starling_engine.config import TiersConfig
from starling_engine.model_config.config import load_model_config
from starling_engine.params import SamplingParams
from starling_engine.platforms.triton_support import INTERPRETED
from starling_engine.request import EngineRequest
from starling_engine.topology.layout import ParallelLayout

from tests.engine.checkpoints import FAMILIES, VOCAB, write_checkpoint
from tests.engine.core.test_drafts import Replay
from tests.engine.cores import core_for, run

LENGTH, STEPS = 300, 90
LAYOUTS = {
    "tensor": {"layout": ParallelLayout(tensor=2)},
    "pipeline": {"layout": ParallelLayout(pipeline=2)},
    "experts": {"layout": ParallelLayout(tensor=2), "expert_parallel": True},
}


INTERPRETED_TOO = ("qwen3.5", "granite-hybrid", "falcon-mamba")
SHARED_TOO = ("kimi-linear", "falcon-h1", "falcon-mamba")
"""Beside latents, beside attention in the same layer, and alone. What ranks keep in a folder depends on no more of a family."""


@dataclass(frozen=True)
class Answer:
    name: str
    folder: Path
    prompt: list[int]
    tokens: list[int]

    def request(self, name: str, **fields: object) -> EngineRequest:
        params = SamplingParams(temperature=0.0, max_tokens=len(self.tokens), ignore_eos=True)
        return EngineRequest(id=name, prompt_ids=self.prompt, params=params, **fields)


@pytest.fixture(
    scope="module",
    params=[
        *("qwen3.5", "kimi-linear", "falcon-h1", "jamba", "falcon-mamba"),
        # Their mixers, or mixers like theirs, are among these.
        *(pytest.param(name, marks=pytest.mark.whole) for name in ("qwen3-next", "lfm2", "granite-hybrid", "nemotron-h", "mamba2")),
    ],
)
def answer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answer:
    folder = tmp_path_factory.mktemp("checkpoint")
    model = write_checkpoint(folder, FAMILIES[request.param])
    prompt = torch.randint(0, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        whole = model.generate(prompt, max_new_tokens=STEPS, do_sample=False, eos_token_id=None)[0]
    return Answer(request.param, folder, prompt[0].tolist(), whole[LENGTH:].tolist())


def folder_tiers(path: Path) -> TiersConfig:
    return TiersConfig(cpu_bytes=16 << 20, fs_path=str(path / "kv"), fs_bytes=256 << 20)


def test_a_prompt_is_found_where_its_snapshot_is_and_so_is_the_next_turn(answer: Answer) -> None:
    with core_for(answer.folder, kv_blocks=400, max_model_len=512) as core:
        first = run(core, [answer.request("first")])["first"]
        assert first == (answer.tokens, None)
        hits = []
        again = run(core, [answer.request("again")])["again"]
        assert again == (answer.tokens, None)
        hits.append(core.scheduler.stats.prefix_hits_total)
        turn = answer.prompt + answer.tokens[:85]
        later = EngineRequest(id="turn", prompt_ids=turn, params=SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
        assert run(core, [later])["turn"] == (answer.tokens[85:], None)
        hits.append(core.scheduler.stats.prefix_hits_total - hits[0])
        assert hits == [296, 384], "the last whole block before the prompt's last token; the last snapshot of an output of 90"


def test_drafts_meet_every_snapshot_of_an_output(answer: Answer) -> None:
    """Some are right, some are wrong; the next turn finds the state of accepted tokens."""
    turn = replace(answer, prompt=answer.prompt + answer.tokens[:85], tokens=answer.tokens[85:])
    with core_for(answer.folder, kv_blocks=400, max_model_len=512) as core:
        known = {name: {"tokens": each.tokens} for name, each in (("first", answer), ("turn", turn))}
        core.scheduler.drafter = drafter = Replay(known, random.Random(0))
        assert run(core, [answer.request("first")])["first"] == (answer.tokens, None)
        assert run(core, [turn.request("turn")])["turn"] == (turn.tokens, None)
        assert core.scheduler.stats.prefix_hits_total == 384 and drafter.drafted > STEPS // 2


@pytest.mark.parametrize("has_tiers", [False, True])
def test_many_at_once_under_pressure(has_tiers: bool, answer: Answer, tmp_path: Path) -> None:
    tiers = folder_tiers(tmp_path) if has_tiers else None
    attends = load_model_config(answer.folder).attends
    with core_for(answer.folder, kv_blocks=130 if attends else 45, budget=64, max_model_len=512, tiers=tiers) as core:
        results = run(core, [answer.request(str(i), cache_salt=str(i % 2)) for i in range(4)])
        assert attends == (core.scheduler.stats.preemptions_total > 0), "what is admitted with a state alone never grows"
        assert all(found == (answer.tokens, None) for found in results.values())
        if has_tiers and attends:  # two states alone leave no room for a snapshot
            core.scheduler.reset_device_cache()
            assert run(core, [answer.request("again", cache_salt="0")])["again"] == (answer.tokens, None)
            assert core.scheduler.snapshot().tiers["cpu"].loaded_bytes_total


@pytest.mark.parametrize("name", ["one", "tensor"])
def test_an_engine_finds_the_state_that_another_one_left_in_a_folder(
    name: str, answer: Answer, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """First what it has computed itself, once the device has forgotten it; then the next engine, which has computed nothing."""
    if name != "one" and answer.name not in SHARED_TOO:
        pytest.skip("two ranks do the same with others, and take seven seconds")
    if name == "one" and answer.name in SHARED_TOO and not pytestconfig.getoption("--whole"):
        pytest.skip("two ranks of these do the same")
    settings = {"kv_blocks": 400, "max_model_len": 512, "tiers": folder_tiers(tmp_path), **LAYOUTS.get(name, {})}
    later = replace(answer, prompt=answer.prompt + answer.tokens[:85], tokens=answer.tokens[85:])
    for expected in ([0, 256, 384], [256, 256, 384]):
        with core_for(answer.folder, **settings) as core:
            found = []
            for turn, each in enumerate((answer, answer, later)):
                before = core.scheduler.stats.external_hits_total
                assert run(core, [each.request(str(turn))])[str(turn)] == (each.tokens, None)
                found.append(core.scheduler.stats.external_hits_total - before)
                core.scheduler.reset_device_cache()
            assert found == expected, "the prompt's last whole chunk before its last token; the last snapshot of an output of 90"


def test_an_engine_of_another_layout_finds_none_of_a_state(answer: Answer, tmp_path: Path) -> None:
    if answer.name not in SHARED_TOO:
        pytest.skip("two ranks do the same with others, and take three seconds")
    for number, layout in enumerate((ParallelLayout(), ParallelLayout(pipeline=2), ParallelLayout(pipeline=2))):
        with core_for(answer.folder, kv_blocks=400, max_model_len=512, tiers=folder_tiers(tmp_path), layout=layout) as core:
            assert run(core, [answer.request("a")])["a"] == (answer.tokens, None)
            assert core.scheduler.stats.external_hits_total == (256 if number == 2 else 0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_share_a_state(name: str, answer: Answer, pytestconfig: pytest.Config) -> None:
    if name == "experts" and load_model_config(answer.folder).moe is None:
        pytest.skip("a model without experts")
    if name != "experts" and answer.name in SHARED_TOO and not pytestconfig.getoption("--whole"):
        pytest.skip("these ranks give the same tokens with a folder, above")
    with core_for(answer.folder, kv_blocks=400, max_model_len=512, **LAYOUTS[name]) as core:
        for turn in range(2):
            assert run(core, [answer.request(str(turn))])[str(turn)] == (answer.tokens, None)
        assert core.scheduler.stats.prefix_hits_total == 296


def test_a_device_keeps_states_too(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are planned ahead, and filled up with sequences that are none: no state is theirs."""
    if answer.name not in INTERPRETED_TOO:
        pytest.skip("the interpreter takes most of a minute for others")
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    requests = [EngineRequest(id=str(length), prompt_ids=answer.prompt[-length:], params=params) for length in (3, 12)]
    with core_for(answer.folder) as core:
        expected = run(core, requests)
    monkeypatch.setenv(INTERPRETED, "1")
    with core_for(answer.folder, device="interpreter", budget=16) as core:
        for _ in range(2):
            assert run(core, requests) == expected
