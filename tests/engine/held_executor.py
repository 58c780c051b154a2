"""A core process in a thread of the test, with an executor whose steps end when the test releases them, or never."""

import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import zmq.asyncio
from starling_engine.config import EngineConfig, SchedulerConfig
from starling_engine.core.client import CoreClient
from starling_engine.core.messages import ShutdownCore
from starling_engine.core.process import CoreProcess
from starling_engine.kv.spec import KVGroup, KVSpec
from starling_engine.ledger import MemoryRequest, plan_memory
from starling_engine.step import StepPlan, StepResult
from starling_engine.token_packing import pack_tokens, unpack_tokens
from starling_engine.worker.commands import Command, Reply
from starling_engine.worker.messages import Phase, WorkerReport

from tests.engine.workers import plain_worker


class StuckExecutor:
    """Takes plans and never answers, as a worker does whose kernel hangs."""

    progress = 7
    joining = ""
    phase = Phase("ready")

    def start(self) -> None: ...

    def ready(self, timeout: float) -> WorkerReport:  # noqa: ARG002
        groups = [KVGroup(KVSpec(16, 1, 8, 4), (0,))]
        request = MemoryRequest(
            total=1 << 30,
            available=1 << 30,
            fraction=0.5,
            weights=0,
            activations=0,
            kv_bytes=None,
            slab_bytes=1024,
            block_size=16,
            useful_blocks=100,
            needed_blocks=2,
        )
        return WorkerReport(groups, None, plan_memory(request), [{}], False, 0, False)

    def submit(self, plan: StepPlan) -> None: ...

    def collect(self, timeout: float) -> StepResult | None:
        time.sleep(timeout)
        return None

    def send(self, command: Command) -> None: ...

    def replies(self, timeout: float = 0.0) -> list[Reply]:  # noqa: ARG002
        return []

    def check(self) -> None: ...

    def shutdown(self) -> None: ...


class HeldExecutor(StuckExecutor):
    """Answers each step once it is `released`: every row samples the first token of its prompt."""

    def __init__(self) -> None:
        self.submitted, self.released = threading.Event(), threading.Event()
        self._prompts: dict[int, int] = {}
        self._plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        self._prompts |= {new.slot: unpack_tokens(new.token_ids)[0] for new in plan.new}
        self._plans.append(plan)
        self.submitted.set()

    def collect(self, timeout: float) -> StepResult | None:  # noqa: ARG002
        assert self.released.wait(20)
        plan = self._plans.pop(0)
        return StepResult(
            plan.step_id, plan.epoch, [1] * len(plan.slots), pack_tokens([self._prompts[slot] for slot in plan.slots])
        )


@asynccontextmanager
async def core_process(folder: Path, executor: StuckExecutor, patience: float = 20.0) -> AsyncIterator[tuple[CoreClient, str]]:
    """Yields a connected client, and the address for more of them. `patience` is the progress timeout in seconds."""
    scheduler = SchedulerConfig(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64)
    worker = plain_worker()
    config = EngineConfig(scheduler=scheduler, worker=worker, block_size=16, progress_timeout=patience)
    address = f"ipc://{folder}/core"
    thread = threading.Thread(target=CoreProcess(config, address, executor).run, daemon=True)
    thread.start()
    context = zmq.asyncio.Context()
    client = CoreClient(context, address, config.progress_timeout)
    try:
        await client.connect()
        yield client, address
    finally:
        await client.send(ShutdownCore())
        await client.close()
        context.term()
        thread.join(60)
        assert not thread.is_alive()
