"""Engine cores over real checkpoints without processes of their own: one drives them step by step, with any layout of ranks."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from starling_engine.config import EngineConfig, SchedulerConfig, VocabularyConfig, WorkerConfig
from starling_engine.core.engine_core import EngineCore
from starling_engine.executor.base import make_executor
from starling_engine.kv.layer_specs import kv_specs
from starling_engine.kv_offload.sizes import rank_slab_bytes
from starling_engine.model_config.config import load_model_config
from starling_engine.params import SamplingParams
from starling_engine.request import EngineRequest
from starling_engine.topology.layout import ParallelLayout

from tests.engine.checkpoints import PROMPT, STEPS, Reference

TIE = 1e-4
MAX_MODEL_LEN = 128


@contextmanager
def core_for(folder: Path, *, kv_blocks: int = 200, **settings: Any) -> Iterator[EngineCore]:
    """A core with its workers. `kv_blocks` counts blocks of the largest group on one rank; the pool is sized in bytes.

    With `elsewhere`, only the first rank is started here; it is called with the address where the others have to join.
    """
    elsewhere: Callable[[str], None] | None = settings.pop("elsewhere", None)
    patience = settings.pop("patience", 60.0)
    layout = settings.pop("layout", ParallelLayout())
    expert_parallel = settings.pop("expert_parallel", False)
    block_size = settings.pop("block_size", 8)
    max_model_len = settings.pop("max_model_len", MAX_MODEL_LEN)
    tiers = settings.pop("tiers", None)
    device = settings.pop("device", "cpu")
    kv_cache = settings.pop("kv_cache", None)
    enforce_eager = settings.pop("enforce_eager", False)
    scheduler = SchedulerConfig(
        max_model_len=max_model_len,
        max_num_seqs=8,
        max_num_batched_tokens=settings.pop("budget", 64),
        stages=layout.pipeline,
        **settings,
    )
    model = load_model_config(folder)
    specs = kv_specs(model, block_size, "float32")
    vocabulary = None
    if (folder / "tokenizer.json").is_file():
        vocabulary = VocabularyConfig(str(folder), model.vocab_size, model.eos_token_ids)
    worker = WorkerConfig(
        model_path=str(folder),
        load_format="auto",
        device=device,
        dtype="float32",
        seed=0,
        max_model_len=max_model_len,
        max_num_seqs=8,
        num_speculative_tokens=scheduler.speculative.num_speculative_tokens,
        own_drafts=scheduler.speculative if scheduler.speculative.method == "ngram" else None,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        block_size=block_size,
        kv_cache_memory_bytes=kv_blocks * sum(spec.layer_block_bytes for spec in specs.values()),
        memory_fraction=0.5,
        attention_backend="auto",
        num_threads=1,
        enforce_eager=enforce_eager,
        layout=layout,
        expert_parallel=expert_parallel,
        tiers=tiers,
        kv_cache=kv_cache,
    )
    if not specs:  # a state alone: blocks are its slabs
        worker = replace(worker, kv_cache_memory_bytes=kv_blocks * rank_slab_bytes(model, worker))
    config = EngineConfig(
        scheduler=scheduler, worker=worker, block_size=block_size, progress_timeout=patience, vocabulary=vocabulary
    )
    sockets = tempfile.TemporaryDirectory(prefix="starling-")
    executor = make_executor(config, Path(sockets.name), "127.0.0.1" if elsewhere is not None else None)
    try:
        executor.start()
        if elsewhere is not None:
            elsewhere(executor.joining)
        deadline = time.monotonic() + 120
        while (report := executor.ready(timeout=1)) is None:
            assert time.monotonic() < deadline, executor.phase
        yield EngineCore(config, executor, report)
    finally:
        executor.shutdown()
        sockets.cleanup()


def run(core: EngineCore, requests: list[EngineRequest]) -> dict[str, tuple[list[int], str | None]]:
    """Runs to the end: the tokens and the error of each request."""
    for request in requests:
        assert core.add(request) is None
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    errors: dict[str, str | None] = {}
    deadline = time.monotonic() + 120
    while core.has_work:
        assert time.monotonic() < deadline
        for delta in core.step():
            tokens[delta.id] += delta.tokens
            if delta.finish_reason is not None:
                errors[delta.id] = delta.error
    while core.has_pending_transfers:
        assert time.monotonic() < deadline
        core.step()
        time.sleep(0.001)
    core.scheduler.check_integrity()
    assert core.scheduler.kv.pool.num_used == 0
    return {name: (tokens[name], errors[name]) for name in tokens}


def greedy(name: str, prompt: list[int], steps: int = STEPS, **fields: Any) -> EngineRequest:
    return EngineRequest(id=name, prompt_ids=prompt, params=SamplingParams(temperature=0.0, max_tokens=steps), **fields)


def assert_greedy(tokens: list[int], reference: Reference) -> None:
    """Equal to transformers', or different first where its two best logits tie."""
    first = next((i for i, (a, b) in enumerate(zip(tokens, reference.tokens, strict=True)) if a != b), None)
    if first is not None:
        best, second = reference.logits[PROMPT + first - 1].topk(2).values.tolist()
        assert best - second < TIE, first
