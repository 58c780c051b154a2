"""Sizes of what a pod needs besides its device."""

from typing import Any

from starling_crds.quantity import parse_quantity

MIB = 2**20
_BASE = 64 * MIB
_EACH_RANK = 256 * MIB


def shm_bytes(per_node: int, memory_limit: int | None) -> int:
    """/dev/shm of a pod with `per_node` ranks: step counters and queues; with several ranks also the buffers of collectives.

    It counts against the container's memory limit as it fills, so it takes at most an eighth of one.
    """
    wanted = _BASE if per_node == 1 else _BASE + per_node * _EACH_RANK
    return wanted if memory_limit is None else max(MIB, min(wanted, memory_limit // 8))


def memory_limit(limits: dict[str, Any]) -> int | None:
    """Of `resources.limits`; None without one. Raises ValueError for what is no size."""
    return parse_quantity(str(limits["memory"])) if "memory" in limits else None
