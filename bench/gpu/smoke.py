"""Every Triton kernel at one real shape beside its torch reference, in one process; then a whole small engine on the device,
recorded and not, beside the host's. A row each, with how far off it is and what a call takes.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bench.gpu.clock import Clock, make_clock
from bench.gpu.compile_ahead import before_kernels
from bench.gpu.faults import each_case
from bench.gpu.table import Row, quantity

if TYPE_CHECKING:
    from bench.gpu.smoke_checks import Check  # at run time only after TRITON_INTERPRET is set


def rows(*, toy: bool, skip: int = 0) -> Iterator[Row]:
    """See `each_case`."""
    yield from before_kernels("bench.gpu.smoke_checks", toy=toy, skip=skip)
    from bench.gpu.smoke_checks import cases

    clock = make_clock(toy=toy)
    checks: list[Check | Answers] = [*cases(toy=toy), Answers(enforce_eager=True), Answers(enforce_eager=False)]

    def run(check: "Check | Answers") -> Iterator[Row]:
        yield _answer(check, toy=toy) if isinstance(check, Answers) else _measure(check, clock)

    yield from each_case(checks, run, skip)


def _measure(check: "Check", clock: Clock) -> Row:
    torch.manual_seed(0)
    ours, reference = check.pair(clock.device)
    error = check.error(ours(), reference())
    if not error <= check.tolerance:  # so that NaN never passes
        raise AssertionError(f"{check.what}: off by {error:.2e} of the largest, {check.tolerance:.0e} is allowed")
    return Row(check.what, quantity(clock([ours]), "s"), f"off by {error:.1e}, up to {check.tolerance:.0e}", met=True)


@dataclass(frozen=True)
class Answers:
    """Tokens of a whole engine."""

    enforce_eager: bool
    what = "a small engine's tokens beside the host's"


PROMPT, NEW = 40, 12


def _answer(case: Answers, *, toy: bool) -> Row:
    """fp32, so that no near tie falls another way."""
    from bench.gpu.shapes import model_folder

    with tempfile.TemporaryDirectory() as root:
        folder = model_folder("Qwen3-0.6B", toy=True, root=Path(root))
        expected = _tokens(folder, "cpu", enforce_eager=True)
        found = _tokens(folder, "interpreter" if toy else "cuda", enforce_eager=case.enforce_eager)
    if found != expected:
        raise AssertionError(f"{found} instead of {expected}")
    return Row(f"{case.what}, {'launched kernel by kernel' if case.enforce_eager else 'recorded'}", f"{len(found)} the same")


def _tokens(folder: Path, device: str, *, enforce_eager: bool) -> list[int]:
    """Returns the tokens of one request, by a worker in this process."""
    from starling_engine.config import WorkerConfig
    from starling_engine.params import SamplingParams
    from starling_engine.step import FOLLOWS, NewRequest, StepPlan, StepResult
    from starling_engine.token_packing import pack_tokens, unpack_tokens
    from starling_engine.worker.worker import Worker

    config = WorkerConfig(
        model_path=str(folder),
        load_format="dummy",
        device=device,
        dtype="float32",
        seed=0,
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        block_size=16,
        kv_cache_memory_bytes=4 << 20,
        memory_fraction=None,
        attention_backend="auto",
        num_threads=1,
        enforce_eager=enforce_eager,
    )
    worker = Worker(config, lambda: None, lambda _: None)
    groups = worker.prepare().groups
    new = NewRequest(
        *(0, pack_tokens(list(range(100, 100 + PROMPT))), PROMPT, [[1, 2, 3, 4] for _ in groups]),
        *(0, SamplingParams(temperature=0.0), None),
    )
    plans = [StepPlan(0, 0, [0], [0], [PROMPT], [True], [new])]
    plans += [StepPlan(step, 0, [0], [FOLLOWS], [1], [True]) for step in range(1, NEW)]

    def finish(plan: StepPlan) -> int:
        result: StepResult = worker.attempt(plan)
        if result.error is not None:
            raise RuntimeError(result.error)
        return int(unpack_tokens(result.tokens)[0])

    return [finish(plan) for plan in plans]
