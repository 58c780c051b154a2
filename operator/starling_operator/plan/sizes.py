"""Sizes of what a pod needs besides its device."""

from typing import Any

from starling_crds.quantity import parse_quantity
from starling_crds.v1alpha1.spec import InferenceServiceSpec
from starling_engine.tiers.store.address import parse_address

MIB = 2**20
_BASE = 64 * MIB
_EACH_RANK = 256 * MIB


def shm_bytes(per_node: int, memory_limit: int | None) -> int:
    """/dev/shm of a pod with `per_node` ranks: step counters and queues; with several ranks also the buffers of collectives.

    It counts against the container's memory limit as it fills, so it takes at most an eighth of one.
    """
    wanted = _BASE if per_node == 1 else _BASE + per_node * _EACH_RANK
    return wanted if memory_limit is None else max(MIB, min(wanted, memory_limit // 8))


def check_tiers(spec: InferenceServiceSpec, memory_limit: int | None) -> None:
    """Raises ValueError where what the pod's ranks keep in host memory leaves nothing of its memory limit.

    What takes the model to know is not counted: weights, and what tiers outside pass through where there is no CPU tier.
    """
    kept = _kept_by_a_rank(spec)
    if memory_limit is None or not kept:
        return
    each = kept | _on_device(spec)
    ranks = spec.accelerators.per_node
    if ranks * sum(each.values()) >= memory_limit:
        sizes = " and ".join(f"{size} bytes of {field}" for field, size in each.items())
        raise ValueError(
            f"{next(iter(kept))}: {sizes} for each of the pod's {ranks} ranks leave nothing of its memory limit; set"
            f" template.spec.containers[agent].resources.limits.memory above {ranks * sum(each.values())}, got {memory_limit}"
        )


def _kept_by_a_rank(spec: InferenceServiceSpec) -> dict[str, int]:
    tier, store = spec.kv_cache.tiers.cpu, spec.kv_cache.store
    kept = {"kvCache.tiers.cpu.bytes": parse_quantity(tier.bytes)} if tier is not None else {}
    if store is not None:
        address = parse_address(store)
        kept["kvCache.store"] = address.segment + address.buffer
    return kept


def _on_device(spec: InferenceServiceSpec) -> dict[str, int]:
    """On CPUs the KV cache is of the same memory."""
    size = spec.engine.kv_memory if spec.accelerators.type == "cpu" else None
    return {"engine.kvMemory": parse_quantity(size)} if size is not None else {}


def memory_limit(limits: dict[str, Any]) -> int | None:
    """Of `resources.limits`; None without one. Raises ValueError for what is no size."""
    return parse_quantity(str(limits["memory"])) if "memory" in limits else None
