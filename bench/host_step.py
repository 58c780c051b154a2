"""What the host does for each decode step, in microseconds: scheduling, the runner's inputs, handing over, results.

    python bench/host_step.py [ROWS ...]

The model and the sampling cost nothing here, and a queue that has done all at once stands for the GPU: what is left is the host. A
GPU is kept busy where its step takes longer than this.
"""

import json
import sys
import time
from pathlib import Path

import torch
from starling_engine.config import EngineConfig, SchedulerConfig, WorkerConfig
from starling_engine.core.engine_core import EngineCore
from starling_engine.executor.thread import ThreadExecutor
from starling_engine.models.decoder import Decoder
from starling_engine.params import SamplingParams
from starling_engine.platforms.cpu import CpuPlatform
from starling_engine.platforms.device_queue import DeviceQueue
from starling_engine.platforms.interpreted import InlineQueue
from starling_engine.request import EngineRequest
from starling_engine.worker import runner_factory, worker

STEPS, WARM = 400, 50
MODEL = Path(__file__).parents[1] / "models" / "starling-pydoc"


class NoWork(CpuPlatform):
    async_scheduling = True
    queue: DeviceQueue | None = InlineQueue()


def core(rows: int) -> EngineCore:
    length = 1024
    sizes = {"max_model_len": length, "max_num_seqs": rows, "max_num_batched_tokens": max(2048, rows)}
    config = WorkerConfig(
        model_path=str(MODEL),
        load_format="dummy",
        device="cpu",
        dtype="float32",
        seed=0,
        block_size=16,
        kv_cache_memory_bytes=None,
        memory_fraction=0.5,
        attention_backend="auto",
        num_threads=1,
        **sizes,
    )
    engine = EngineConfig(scheduler=SchedulerConfig(**sizes), worker=config, block_size=16, progress_timeout=60)
    executor = ThreadExecutor(config)
    executor.start()
    while (report := executor.ready(1)) is None:
        pass
    return EngineCore(engine, executor, report)


def microseconds(rows: int) -> float:
    engine = core(rows)
    for number in range(rows):
        params = SamplingParams(temperature=0.0, max_tokens=STEPS + WARM + 10, ignore_eos=True)
        engine.add(EngineRequest(id=str(number), prompt_ids=[number % 500 + 5] * 8, params=params))
    while engine.scheduler.stats.steps_total < WARM:
        engine.step()
    first, began = engine.scheduler.stats.steps_total, time.perf_counter()
    while engine.scheduler.stats.steps_total < first + STEPS:
        engine.step()
    took = time.perf_counter() - began
    engine.executor.shutdown()
    return took / STEPS * 1e6


def main() -> None:
    model = json.loads((MODEL / "config.json").read_text())
    logits = torch.zeros(1, model["vocab_size"])
    worker.select_platform = lambda *_: NoWork()
    runner_factory.select_sample_op = lambda _: lambda logits, *_: torch.full((len(logits),), 3)
    Decoder.eager_reason = None
    Decoder.forward = lambda _, ids, ctx, *__: torch.zeros(len(ids if ctx.rows is None else ctx.rows), model["hidden_size"])
    Decoder.logits = lambda _, hidden, out=None: logits.expand(len(hidden), -1) if out is None else out
    for rows in map(int, sys.argv[1:] or (1, 64, 256)):
        print(f"{rows} rows: {microseconds(rows):.0f} us a step")


if __name__ == "__main__":
    main()
