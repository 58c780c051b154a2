"""The engine core: one scheduler and its executor, stepped by whoever owns it."""

from starling_engine.config import EngineConfig
from starling_engine.delta import Delta
from starling_engine.executor.base import Executor
from starling_engine.kv.manager import KVManager
from starling_engine.layout import Membership
from starling_engine.request import EngineRequest
from starling_engine.scheduler.scheduler import Scheduler
from starling_engine.worker.report import WorkerReport

COLLECT_SECONDS = 0.2
"""How long a step may keep the core from answering pings."""


class EngineCore:
    """`executor` must be ready; `report` is what it said of its memory."""

    def __init__(self, config: EngineConfig, executor: Executor, report: WorkerReport) -> None:
        self.membership = Membership.first(config.worker.layout)
        self.executor = executor
        self.ledger = report.ledger
        asynchronous = report.async_scheduling if config.async_scheduling is None else config.async_scheduling
        self.depth = config.worker.layout.depth(asynchronous=asynchronous)
        settings = config.scheduler
        kv = KVManager(
            report.groups,
            report.ledger.num_blocks,
            prefix_caching=settings.prefix_caching,
            chunk=self.depth * settings.max_num_batched_tokens,
        )
        self.scheduler = Scheduler(settings, kv, self.membership.epoch)

    def add(self, request: EngineRequest) -> Delta | None:
        """Queues a request; returns the answer when there is one at once."""
        answer = self.scheduler.answer_at_once(request)
        if answer is None:
            self.scheduler.add(request)
        return answer

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[Delta]:
        """Keeps up to `depth` steps in flight and takes in the oldest result, if it has come within COLLECT_SECONDS."""
        while self.scheduler.num_in_flight < self.depth and (plan := self.scheduler.schedule()) is not None:
            self.executor.submit(plan)
        if not self.scheduler.num_in_flight:
            return []
        result = self.executor.collect(COLLECT_SECONDS)
        return self.scheduler.update(result) if result is not None else []
