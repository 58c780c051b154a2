"""The whole engine core over real architectures, against transformers: KV groups of different windows in one pool, preemption,
chunks, prefix hits, and faults of a step.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starling_engine.config import EngineConfig, SchedulerConfig, WorkerConfig
from starling_engine.core.engine_core import EngineCore
from starling_engine.executor.thread import ThreadExecutor
from starling_engine.models.config import load_model_config
from starling_engine.models.kv import kv_specs
from starling_engine.params import SamplingParams
from starling_engine.request import EngineRequest

from tests.engine.checkpoints import PROMPT, STEPS, VARIANTS, VOCAB, Reference, make_reference

TIE = 1e-4
MAX_MODEL_LEN = 128


@pytest.fixture(
    scope="module",
    params=["qwen3-mixed", "ministral-mixed", "mistral-window", "llama3.1", "qwen3-moe", "deepseek-v3"],
)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(tmp_path_factory.mktemp("checkpoint"), VARIANTS[request.param])


@contextmanager
def core_for(folder: Path, *, kv_blocks: int = 200, **settings: Any) -> Iterator[EngineCore]:
    """A core with its worker thread. `kv_blocks` counts blocks of the largest group; the pool is sized in bytes."""
    scheduler = SchedulerConfig(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        max_num_batched_tokens=settings.pop("budget", 64),
        **settings,
    )
    worker = WorkerConfig(
        model_path=str(folder),
        load_format="auto",
        device="cpu",
        dtype="float32",
        seed=0,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        block_size=8,
        kv_cache_memory_bytes=kv_blocks * sum(spec.page_bytes for spec in kv_specs(load_model_config(folder), 8, 4)),
        memory_fraction=0.5,
        attention_backend="auto",
        num_threads=1,
    )
    config = EngineConfig(scheduler=scheduler, worker=worker, block_size=8, progress_timeout=60)
    executor = ThreadExecutor(worker, scheduler.eos_token_ids)
    executor.start()
    report = executor.ready(timeout=60)
    assert report is not None
    try:
        yield EngineCore(config, executor, report)
    finally:
        executor.shutdown()


def run(core: EngineCore, requests: list[EngineRequest]) -> dict[str, tuple[list[int], str | None]]:
    """Runs to the end: the tokens and the error of each request."""
    for request in requests:
        assert core.add(request) is None
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    errors: dict[str, str | None] = {}
    deadline = time.monotonic() + 60
    while core.has_work:
        assert time.monotonic() < deadline
        for delta in core.step():
            tokens[delta.id] += delta.tokens
            if delta.finish_reason is not None:
                errors[delta.id] = delta.error
    core.scheduler.check_integrity()
    assert core.scheduler.kv.pool.num_used == 0
    return {name: (tokens[name], errors[name]) for name in tokens}


def greedy(name: str, prompt: list[int], **fields: Any) -> EngineRequest:
    return EngineRequest(id=name, prompt_ids=prompt, params=SamplingParams(temperature=0.0, max_tokens=STEPS), **fields)


def assert_greedy(tokens: list[int], reference: Reference) -> None:
    """Equal to transformers', or different first where its two best logits tie."""
    first = next((i for i, (a, b) in enumerate(zip(tokens, reference.tokens, strict=True)) if a != b), None)
    if first is not None:
        best, second = reference.logits[PROMPT + first - 1].topk(2).values.tolist()
        assert best - second < TIE, first


def test_many_at_once_under_pressure(reference: Reference) -> None:
    """The same request six times in a pool that holds about two, with chunks, hits and preemptions."""
    with core_for(reference.folder, kv_blocks=34, budget=24) as core:
        results = run(core, [greedy(str(i), reference.prompt, cache_salt=str(i % 3)) for i in range(6)])
        if not any(group.spec.window for group in core.scheduler.kv.groups):  # windows give their blocks back in time
            assert core.scheduler.stats.preemptions_total > 0
        for tokens, error in results.values():
            assert error is None
            assert_greedy(tokens, reference)
        again = run(core, [greedy("again", reference.prompt, cache_salt="0")])
        assert_greedy(again["again"][0], reference)
        assert core.scheduler.stats.prefix_hits_total > 0


def test_a_fork_copies_what_it_writes(reference: Reference) -> None:
    """The prompt's last block is shared by two that go on differently."""
    with core_for(reference.folder) as core:
        sampled = SamplingParams(temperature=1.0, max_tokens=STEPS, ignore_eos=True)
        alone = run(core, [EngineRequest(id="alone", prompt_ids=reference.prompt, params=sampled, seed=5)])
        fork = EngineRequest(id="fork", prompt_ids=reference.prompt, params=sampled, seed=5, fork_of="parent")
        results = run(core, [greedy("parent", reference.prompt, cache_salt="new"), fork])
        assert results["fork"] == alone["alone"]
        assert results["fork"][0] != results["parent"][0]
        assert_greedy(results["parent"][0], reference)


def test_a_resume_record_continues_where_another_core_stopped(reference: Reference) -> None:
    with core_for(reference.folder) as core:
        record = greedy("resumed", reference.prompt, output_ids=reference.tokens[:20])
        tokens, _ = run(core, [record])["resumed"]
        assert len(tokens) == STEPS - 20
        assert_greedy(reference.tokens[:20] + tokens, reference)


def test_a_fault_is_pinned_on_its_request(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that raises is run again request by request; only the one that raises alone ends."""
    from starling_engine.worker.batch import InputBatch

    real = InputBatch.inputs

    def inputs(self: InputBatch, plan: Any) -> Any:
        if any(self.tokens[slot, 0] == VOCAB - 1 for slot in plan.slots):
            raise RuntimeError("no such thing")
        return real(self, plan)

    monkeypatch.setattr(InputBatch, "inputs", inputs)
    with core_for(reference.folder) as core:
        results = run(core, [greedy("good", reference.prompt), greedy("bad", [VOCAB - 1, 3, 4]), greedy("fine", reference.prompt)])
        assert "no such thing" in (results["bad"][1] or "")
        assert_greedy(results["good"][0], reference)
        assert_greedy(results["fine"][0], reference)
