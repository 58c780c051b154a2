"""An encoder's prompts: each is computed whole, in one step, whatever fails or is aborted meanwhile; nothing is cached."""

import random
from collections import deque

import pytest
from starling_engine.config import SchedulerConfig, SchedulingPolicy
from starling_engine.delta import Delta
from starling_engine.kv.manager import KVManager
from starling_engine.params import PoolingParams
from starling_engine.request import EngineRequest
from starling_engine.scheduler.scheduler import Scheduler
from starling_engine.step import RowExtras, StepPlan, StepResult
from starling_engine.token_packing import pack_floats

LONGEST, BUDGET, SLOTS = 32, 40, 3
BAD = 49
"""A step with a prompt that begins with it fails."""


class Encoder:
    """Answers plans with the lengths of their prompts, and checks that each row is a whole prompt."""

    def __init__(self, lengths: dict[int, list[int]]) -> None:
        self._prompts = lengths

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.total_tokens <= BUDGET and set(plan.starts) == {0} and all(plan.sample)
        assert [new.slot for new in plan.new] == plan.slots and not any(new.blocks for new in plan.new)
        prompts = [self._prompts[new.seed] for new in plan.new]
        assert list(map(len, prompts)) == plan.num_tokens
        if any(prompt[0] == BAD for prompt in prompts):
            return StepResult(plan.step_id, plan.epoch, error="boom")
        extras = {row: RowExtras(pooled=pack_floats([len(prompt)])) for row, prompt in enumerate(prompts)}
        return StepResult(plan.step_id, plan.epoch, [0] * len(prompts), extras=extras)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("depth", [1, 2])
def test_random_traffic_with_faults_and_aborts(policy: SchedulingPolicy, depth: int) -> None:
    rng, prompts, finished = random.Random(depth), dict[int, list[int]](), dict[str, Delta]()
    settings = SchedulerConfig(
        max_model_len=LONGEST,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=BUDGET,
        policy=policy,
        prefix_caching=False,
        whole_prompts=True,
        step_target_ms=0,
    )
    scheduler, encoder = Scheduler(settings, KVManager([], 1, prefix_caching=False)), Encoder(prompts)
    in_flight, aborted = deque[StepPlan](), set[str]()
    while len(prompts) < 200 or scheduler.has_work:
        if len(prompts) < 200 and rng.random() < 0.8:
            number, length = len(prompts), rng.choice([1, 2, 7, LONGEST])
            prompts[number] = [BAD if rng.random() < 0.1 else 5] * length
            pooling = PoolingParams(pooling="mean", normalize=False)
            request = EngineRequest(
                id=str(number), prompt_ids=prompts[number], seed=number, pooling=pooling, priority=rng.randrange(3)
            )
            assert scheduler.answer_at_once(request) is None
            scheduler.add(request)
        if rng.random() < 0.1 and scheduler.requests:
            name = rng.choice(list(scheduler.requests))
            scheduler.abort(name)
            aborted.add(name)
        plan = scheduler.schedule() if len(in_flight) < depth else None
        if plan is not None:
            in_flight.append(plan)
        elif in_flight:
            finished |= {delta.id: delta for delta in scheduler.update(encoder.execute(in_flight.popleft()))}
    assert finished.keys() | aborted == set(map(str, prompts)) and not finished.keys() & aborted
    for name, delta in finished.items():
        prompt = prompts[int(name)]
        assert (delta.pooled, delta.error) == ((None, "boom") if prompt[0] == BAD else (pack_floats([len(prompt)]), None))
    stats = scheduler.snapshot()
    assert (stats.running, stats.waiting, stats.kv_blocks, stats.prefix_queries_total) == (0, 0, 0, 0)
    assert stats.step_tokens == BUDGET, "no stream waits for prompts"
