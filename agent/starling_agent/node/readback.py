"""What the report says of the engine, read from the engine itself and not from what was asked for."""

from typing import Any

from starling_engine import AsyncEngine
from starling_engine.topology.layout import ParallelLayout

from starling_agent.contract.report import KVLedger, RankHealth, Report, Topology, WorkerStart


def read_back(engine: AsyncEngine) -> dict[str, Any]:
    """Changes of the report when an engine is there."""
    cores = engine.cores
    membership, memory = cores.membership, cores.memory
    layout = membership.layout
    return {
        "epoch": membership.epoch,
        "topology": Topology(
            tensor=layout.tensor,
            pipeline=layout.pipeline,
            data=layout.data,
            expert=_expert(engine, layout),
            ranks=layout.world_size,
        ),
        "starts": [
            WorkerStart(core=core, rank=rank, seconds={step: round(took, 3) for step, took in seconds.items()})
            for core, ranks in enumerate(cores.start_seconds)
            for rank, seconds in enumerate(ranks)
        ],
        "ranks": [RankHealth(rank=rank, worker=worker, healthy=True) for rank, worker in enumerate(membership.workers)],
        "kv": KVLedger(num_blocks=memory.num_blocks, block_size=memory.block_size, bytes=memory.kv, max_tokens=cores.kv_tokens),
    }


def _expert(engine: AsyncEngine, layout: ParallelLayout) -> int:
    """Ranks that hold the experts among them."""
    worker = engine.config.worker
    if not worker.expert_parallel:
        return 1
    return layout.data * layout.tensor if worker.lockstep else layout.tensor


def nothing_left(report: Report, cause: str) -> dict[str, Any]:
    """And when it is gone: the ranks that were, each with the cause."""
    ranks = [rank.model_copy(update={"healthy": False, "error": cause}) for rank in report.ranks]
    return {"topology": None, "kv": None, "starts": [], "ranks": ranks, "last_error": cause}
