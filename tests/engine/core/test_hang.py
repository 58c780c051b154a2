"""A core that answers but makes no progress is as good as dead, and says so."""

import asyncio
import threading
import time
from pathlib import Path

import pytest
import zmq.asyncio
from starling_engine.config import EngineConfig, SchedulerConfig, WorkerConfig
from starling_engine.core.client import CoreClient
from starling_engine.core.messages import Add, Shutdown
from starling_engine.core.process import CoreProcess
from starling_engine.delta import Delta
from starling_engine.epoch import Balance, EpochAnswer, EpochOrder, Rearranged
from starling_engine.errors import EngineDead
from starling_engine.kv.spec import KVGroup, KVSpec
from starling_engine.ledger import plan_memory
from starling_engine.request import EngineRequest
from starling_engine.step import StepPlan, StepResult
from starling_engine.worker.report import Phase, WorkerReport


class StuckExecutor:
    """Takes plans and never answers, as a worker does whose kernel hangs."""

    progress = 7
    store_port = 0
    joining = ""
    phase = Phase("ready")

    def start(self) -> None: ...

    def ready(self, timeout: float) -> WorkerReport:  # noqa: ARG002
        groups = [KVGroup(KVSpec(16, 1, 8, 4), (0,))]
        ledger = plan_memory(
            total=1 << 30,
            available=1 << 30,
            fraction=0.5,
            weights=0,
            activations=0,
            kv_bytes=None,
            bytes_per_block=1024,
            block_size=16,
            useful_blocks=100,
            needed_blocks=2,
        )
        return WorkerReport(groups, ledger, [{}], False)

    def submit(self, plan: StepPlan) -> None: ...

    def collect(self, timeout: float) -> StepResult | None:
        time.sleep(timeout)
        return None

    def idle(self) -> None: ...

    def order(self, order: EpochOrder) -> None: ...

    def answers(self) -> list[EpochAnswer]:
        return []

    def balances(self) -> list[Balance | Rearranged]:
        return []

    def check(self) -> None: ...

    def shutdown(self) -> None: ...


async def test_work_without_progress_ends_every_request(tmp_path: Path) -> None:
    scheduler = SchedulerConfig(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64)
    worker = WorkerConfig(
        model_path="",
        load_format="auto",
        device="cpu",
        dtype="float32",
        seed=0,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=16,
        kv_cache_memory_bytes=None,
        memory_fraction=0.5,
        attention_backend="auto",
        num_threads=1,
    )
    config = EngineConfig(scheduler=scheduler, worker=worker, block_size=16, progress_timeout=1.0)
    address = f"ipc://{tmp_path}/core"
    thread = threading.Thread(target=CoreProcess(config, address, StuckExecutor()).run, daemon=True)
    thread.start()
    context = zmq.asyncio.Context()
    client = CoreClient(context, address, config.progress_timeout)
    await client.connect()
    await asyncio.sleep(1.5)
    client.check()  # idle without progress is healthy
    deltas: asyncio.Queue[Delta] = asyncio.Queue()
    await client.add(Add(EngineRequest(id="a", prompt_ids=[1, 2])), deltas.put_nowait)
    delta = await asyncio.wait_for(deltas.get(), timeout=10)
    assert "no progress" in (delta.error or "")
    with pytest.raises(EngineDead):
        client.check()
    await client.send(Shutdown())
    await client.close()
    context.term()
    await asyncio.to_thread(thread.join, 5)
    assert not thread.is_alive()
