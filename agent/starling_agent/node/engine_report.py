"""The report's fields about the engine, read from the engine itself and not from its configuration."""

from typing import Any

from starling_engine import AsyncEngine
from starling_engine.topology.layout import ParallelLayout

from starling_agent.contract.report import KVLedger, RankHealth, Report, Topology, WorkerStart


def report_of_engine(engine: AsyncEngine) -> dict[str, Any]:
    """Returns the changes of the report while an engine runs."""
    cores = engine.cores
    membership = cores.membership
    layout = membership.layout
    return {
        "epoch": membership.epoch,
        "topology": Topology(
            tensor=layout.tensor,
            pipeline=layout.pipeline,
            data=layout.data,
            expert=_expert_ranks(engine, layout),
            ranks=layout.world_size,
        ),
        "starts": [
            WorkerStart(core=core, rank=rank, seconds={step: round(took, 3) for step, took in seconds.items()})
            for core, ranks in enumerate(cores.start_seconds)
            for rank, seconds in enumerate(ranks)
        ],
        "ranks": [RankHealth(rank=rank, worker=worker, healthy=True) for rank, worker in enumerate(membership.workers)],
        "kv": _kv_ledger(engine),
    }


def _kv_ledger(engine: AsyncEngine) -> KVLedger | None:
    """Returns the KV cache; None for a model that caches nothing."""
    cores, memory = engine.cores, engine.cores.memory
    if not memory.slab_bytes:
        return None
    # A state has room for any number of tokens, more than JSON's readers can count.
    longest = cores.longest_request if memory.state_blocks else cores.kv_tokens
    return KVLedger(num_blocks=memory.num_blocks, block_size=memory.block_size, bytes=memory.kv, max_tokens=longest)


def _expert_ranks(engine: AsyncEngine, layout: ParallelLayout) -> int:
    """Returns the number of ranks that share the experts."""
    worker = engine.config.worker
    if not worker.expert_parallel:
        return 1
    return layout.data * layout.tensor if worker.dp_sync else layout.tensor


def report_without_engine(report: Report, cause: str) -> dict[str, Any]:
    """Returns the changes when the engine has ended: its last ranks, each with the cause."""
    ranks = [rank.model_copy(update={"healthy": False, "error": cause}) for rank in report.ranks]
    return {"topology": None, "kv": None, "starts": [], "ranks": ranks, "last_error": cause}
