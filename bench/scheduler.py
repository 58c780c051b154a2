"""What a step of scheduling costs: schedule() and update() at a number of decoding requests, without a model.

usage: scheduler.py [RUNNING ...]
"""

import statistics
import sys
import time

from starling_engine.config import SchedulerConfig
from starling_engine.kv.manager import KVManager
from starling_engine.kv.spec import KVGroup, KVSpec
from starling_engine.params import SamplingParams
from starling_engine.request import EngineRequest
from starling_engine.scheduler.scheduler import Scheduler
from starling_engine.step import StepPlan, StepResult
from starling_engine.token_packing import pack_tokens

STEPS = 300
PROMPT = 128


def answer(plan: StepPlan) -> StepResult:
    return StepResult(plan.step_id, plan.epoch, [int(sample) for sample in plan.sample], pack_tokens([7] * sum(plan.sample)))


def measure(running: int, prefix_caching: bool) -> list[float]:
    """Seconds of each step while all of `running` requests decode; every 16th step all of them take a new block."""
    groups = [KVGroup(KVSpec(16, 8, 128, 2), (0,))]
    kv = KVManager(groups, running * 64 + 1, prefix_caching=prefix_caching)
    config = SchedulerConfig(max_model_len=2048, max_num_seqs=running, max_num_batched_tokens=8192, prefix_caching=prefix_caching)
    scheduler = Scheduler(config, kv)
    for i in range(running):
        prompt = [(i * 31 + j) % 50_000 for j in range(PROMPT)]
        scheduler.add(EngineRequest(id=str(i), prompt_ids=prompt, params=SamplingParams(max_tokens=STEPS + 50, ignore_eos=True)))
    while any(request.planned < PROMPT for request in scheduler.requests.values()):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.update(answer(plan))
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        plan = scheduler.schedule()
        planned = time.perf_counter() - began
        assert plan is not None and len(plan.slots) == running
        result = answer(plan)
        began = time.perf_counter()
        scheduler.update(result)
        seconds.append(planned + time.perf_counter() - began)
    return seconds


def main() -> None:
    print(f"{'running':>8} {'prefix caching':>15} {'median ms':>10} {'mean ms':>8} {'p99 ms':>8}")
    for running in [int(arg) for arg in sys.argv[1:]] or [32, 256, 1024]:
        for caching in (True, False):
            seconds = [1e3 * s for s in measure(running, caching)]
            p99 = sorted(seconds)[int(len(seconds) * 0.99)]
            print(f"{running:>8} {caching!s:>15} {statistics.median(seconds):>10.3f} {statistics.mean(seconds):>8.3f} {p99:>8.3f}")


if __name__ == "__main__":
    main()
