"""Every layout of ranks gives what transformers gives: chunked, batched, preempted, and after prefix hits."""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from starling_engine.executor import processes
from starling_engine.step import StepPlan
from starling_engine.topology.layout import ParallelLayout

from tests.engine.checkpoints import VARIANTS, Reference, make_reference
from tests.engine.cores import assert_greedy, core_for, greedy, run
from tests.engine.mixed_requests import answers, assert_same, request

TP2, TP4 = ParallelLayout(tensor=2), ParallelLayout(tensor=4)
CASES = [
    ("llama-biases", TP2),
    ("llama-tied-wide-heads", TP4),  # more ranks than key-value heads
    ("qwen3-mixed", TP2),
    ("qwen2", TP4),
    ("qwen3-tied", ParallelLayout(pipeline=2)),
    ("qwen3-tied", ParallelLayout(pipeline=3)),
    ("qwen3-mixed", ParallelLayout(pipeline=3)),
    ("llama3.1", ParallelLayout(pipeline=2, tensor=2)),
    ("qwen3-moe", ParallelLayout(tensor=2)),
    ("mixtral", ParallelLayout(pipeline=2, tensor=2)),
    ("gpt-oss", ParallelLayout(tensor=2)),
    ("deepseek-v3", ParallelLayout(tensor=2)),
    ("deepseek-v2", ParallelLayout(pipeline=3)),
]
EXPERT_PARALLEL = [("qwen3-moe", TP2), ("gpt-oss", TP2), ("deepseek-v3", TP4), ("mixtral", ParallelLayout(pipeline=2, tensor=2))]

STEPS = 32
"""Tokens of an answer: four of them, with their prompts, are more than the cache holds."""

LATE = [
    ("qwen3-mixed", TP2, "recorded"),
    ("qwen3-tied", ParallelLayout(pipeline=3), "recorded"),
    ("llama3.1", ParallelLayout(pipeline=2, tensor=2), "recorded"),
    ("deepseek-v2", ParallelLayout(pipeline=2), "eager"),
]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    names = dict.fromkeys(name for name, _ in CASES + EXPERT_PARALLEL)
    return {name: make_reference(tmp_path_factory.mktemp("checkpoint"), VARIANTS[name]) for name in names}


@pytest.mark.parametrize(("name", "layout"), CASES, ids=[f"{name}-{layout}" for name, layout in CASES])
@pytest.mark.matrix
def test_the_same_greedy_tokens(name: str, layout: ParallelLayout, references: dict[str, Reference]) -> None:
    check_layout(references[name], layout=layout)


@pytest.mark.parametrize(("name", "layout"), EXPERT_PARALLEL, ids=[f"{name}-{layout}" for name, layout in EXPERT_PARALLEL])
def test_the_same_greedy_tokens_with_whole_experts_on_each_rank(
    name: str, layout: ParallelLayout, references: dict[str, Reference]
) -> None:
    check_layout(references[name], layout=layout, expert_parallel=True)


@pytest.mark.parametrize(("name", "layout", "how"), LATE, ids=[f"{name}-{layout}-{how}" for name, layout, how in LATE])
def test_the_same_greedy_tokens_of_devices_that_are_a_step_ahead(
    name: str, layout: ParallelLayout, how: str, references: dict[str, Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_late(monkeypatch, how)
    check_layout(references[name], layout=layout)


def test_a_rank_feeds_its_own_token_where_only_the_other_one_knows_it(
    references: dict[str, Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a step ahead the scheduler knows each token, of the rank that samples, before the slow one has read its own."""
    make_late(monkeypatch, "slow")
    reference = references["llama3.1"]
    with core_for(reference.folder, layout=TP2) as core:
        core.depth = 1
        for tokens, error in run(core, [greedy(name, reference.prompt) for name in "ab"]).values():
            assert error is None
            assert_greedy(tokens, reference)


def test_recorded_steps_find_the_experts_of_other_ranks(references: dict[str, Reference], monkeypatch: pytest.MonkeyPatch) -> None:
    make_late(monkeypatch, "recorded")
    check_layout(references["qwen3-moe"], layout=TP2, expert_parallel=True)


def test_ranks_agree_on_extra_outputs(references: dict[str, Reference], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each counts the tokens that it has sampled by itself."""
    folder, requests = references["llama3.1"].folder, [request(random.Random(number), number) for number in range(8)]
    with core_for(folder) as core:
        expected = answers(core, requests)
    make_late(monkeypatch, "recorded")
    with core_for(folder, layout=ParallelLayout(pipeline=2, tensor=2)) as core:
        assert_same(answers(core, requests), expected)


def make_late(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Gives the workers that start from now on a late device; see `tests.engine.late_device`."""
    monkeypatch.setattr(processes, "WORKER", ("tests.engine.parallel.late_worker", how))


def check_layout(reference: Reference, **settings: Any) -> None:
    reference = replace(reference, tokens=reference.tokens[:STEPS])
    with core_for(reference.folder, kv_blocks=34, budget=24, **settings) as core:
        results = run(core, [greedy(str(i), reference.prompt, STEPS, cache_salt=str(i % 3)) for i in range(6)])
        again = run(core, [greedy("again", reference.prompt, STEPS, cache_salt="0")])
        for tokens, error in (*results.values(), *again.values()):
            assert error is None
            assert_greedy(tokens, reference)
        assert core.scheduler.stats.prefix_hits_total > 0


def test_two_stages_work_on_two_steps_at_once(references: dict[str, Reference], monkeypatch: pytest.MonkeyPatch) -> None:
    reference = references["qwen3-tied"]
    with core_for(reference.folder, layout=ParallelLayout(pipeline=2), prefix_caching=False) as core:
        plans: list[StepPlan] = []
        submit = core.executor.submit
        monkeypatch.setattr(core.executor, "submit", lambda plan: (plans.append(plan), submit(plan)))
        for name in "abcd":
            assert core.add(greedy(name, reference.prompt)) is None
        in_flight = []
        while core.has_work:
            core.step()
            in_flight.append(core.scheduler.num_in_flight)
        decodes = [set(plan.slots) for plan in plans if set(plan.num_tokens) == {1} and len(plan.slots) == 2]
        assert len(decodes) > 100  # of 126: two at a time of four
        assert all(not first & second for first, second in pairwise(decodes))
        # A step that was collected leaves the other stage's in flight.
        assert in_flight.count(1) > 100


def test_the_rank_with_the_least_room_decides(references: dict[str, Reference]) -> None:
    """Of three layers the first stage has one and the second two, so its blocks are twice as large."""
    folder = references["qwen3-tied"].folder
    with core_for(folder, layout=ParallelLayout(pipeline=2), kv_blocks=60) as core, core_for(folder, kv_blocks=60) as alone:
        assert alone.ledger.num_blocks == 60
        assert core.ledger.num_blocks == 90
