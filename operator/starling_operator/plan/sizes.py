"""Sizes of what a pod needs besides its device."""

from typing import Any

from starling_crds.quantity import parse_quantity
from starling_crds.v1alpha1.spec import InferenceServiceSpec

MIB = 2**20
_BASE = 64 * MIB
_EACH_RANK = 256 * MIB


def shm_bytes(per_node: int, memory_limit: int | None) -> int:
    """/dev/shm of a pod with `per_node` ranks: step counters and queues; with several ranks also the buffers of collectives.

    It counts against the container's memory limit as it fills, so it takes at most an eighth of one.
    """
    wanted = _BASE if per_node == 1 else _BASE + per_node * _EACH_RANK
    return wanted if memory_limit is None else max(MIB, min(wanted, memory_limit // 8))


def check_cpu_tier(spec: InferenceServiceSpec, memory_limit: int | None) -> None:
    """Raises ValueError where the CPU tiers of a pod's ranks, and on CPUs their KV caches, leave nothing of its memory limit."""
    tier = spec.kv_cache.tiers.cpu
    if tier is None or memory_limit is None:
        return
    ranks = spec.accelerators.per_node
    device = spec.engine.kv_memory if spec.accelerators.type == "cpu" else None
    each = parse_quantity(tier.bytes) + (parse_quantity(device) if device else 0)
    if ranks * each >= memory_limit:
        besides = f" and their KV caches ({device} each)" if device else ""
        raise ValueError(
            f"kvCache.tiers.cpu.bytes: the tiers of the pod's {ranks} ranks ({tier.bytes} each){besides} leave nothing of its"
            f" memory limit; set template.spec.containers[agent].resources.limits.memory above {ranks * each}, got {memory_limit}"
        )


def memory_limit(limits: dict[str, Any]) -> int | None:
    """Of `resources.limits`; None without one. Raises ValueError for what is no size."""
    return parse_quantity(str(limits["memory"])) if "memory" in limits else None
