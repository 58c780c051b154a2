"""Resources of a pod besides its devices: requests, shared memory, and what its memory limit has to hold."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from starling_crds.quantity import parse_quantity
from starling_crds.v1alpha1.spec import InferenceServiceSpec
from starling_engine.config import most_staging_bytes
from starling_engine.kv_offload.secondary.store.address import parse_address

_T = TypeVar("_T", dict[str, Any], list[Any])
MIB = 2**20
_BASE = 64 * MIB
_EACH_RANK = 256 * MIB
_MILLICORES = 250
_LEAST_MEMORY = 512 * MIB
_QUANTITY = re.compile(r"(\d+\.?\d*|\.\d+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?\d+)?")


def shm_bytes(per_node: int, memory_limit: int | None) -> int:
    """Returns the size of /dev/shm for `per_node` ranks: step counters, queues, and with several ranks buffers of collectives.

    Its pages count against the container's memory limit, so it takes at most an eighth of that.
    """
    wanted = _BASE if per_node == 1 else _BASE + per_node * _EACH_RANK
    return wanted if memory_limit is None else max(MIB, min(wanted, memory_limit // 8))


def check_tiers(spec: InferenceServiceSpec, memory_limit: int | None) -> None:
    """Raises ValueError if what the pod's ranks keep in host memory leaves nothing of its memory limit.

    Weights are not counted, since only a model's reader knows their size. Staging buffers are counted at their largest.
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
            + ("" if spec.kv_cache.tiers.cpu is not None else "; files and a store take less with a small kvCache.tiers.cpu")
        )


def requests(spec: InferenceServiceSpec) -> dict[str, str]:
    """Returns a pod's requests, which hold for any model: so it is not evicted before pods without requests.

    Each rank gets a quarter of a core, the memory that the spec gives it, and 512 MiB. The pod gets the weights cache's limit of
    the node's disk. Weights are not counted, since only a model's reader knows their size.
    """
    ranks = spec.accelerators.per_node
    memory = sum((_kept_by_a_rank(spec) | _on_device(spec)).values()) + _LEAST_MEMORY
    found = {"cpu": f"{ranks * _MILLICORES}m", "memory": str(ranks * memory)}
    if spec.model.cache.size_limit is not None:
        found["ephemeral-storage"] = spec.model.cache.size_limit
    return found


def check_quantities(template: Mapping[str, Any]) -> None:
    """Raises ValueError naming the first resource that is no quantity: the API server names no field."""
    for name in ("containers", "initContainers"):
        path = f"template.spec.{name}"
        for place, container in enumerate(_typed(template["spec"].get(name), list, path)):
            title = _typed(container, dict, f"{path}[{place}]").get("name", place)
            resources = _typed(container.get("resources"), dict, f"{path}[{title}].resources")
            for part in ("requests", "limits"):
                field = f"{path}[{title}].resources.{part}"
                for resource, value in _typed(resources.get(part), dict, field).items():
                    if not _QUANTITY.fullmatch(str(value)):
                        raise ValueError(f"{field}.{resource}: must be a quantity such as 500m, 2 or 4Gi, got {value!r}")


def _typed(value: Any, kind: type[_T], field: str) -> _T:
    """Returns the value, or an empty one for null. CRDs keep what is below `template` as it is written."""
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise ValueError(f"{field}: must be a {'map' if kind is dict else 'list'}, got {value!r}")
    return value


def _kept_by_a_rank(spec: InferenceServiceSpec) -> dict[str, int]:
    tiers, store = spec.kv_cache.tiers, spec.kv_cache.store
    kept = {}
    if tiers.cpu is not None:
        kept["kvCache.tiers.cpu.bytes"] = parse_quantity(tiers.cpu.bytes)
    elif tiers.filesystem is not None:
        kept["kvCache.tiers.filesystem"] = most_staging_bytes(_device_cache(spec))
    if store is not None:
        address = parse_address(store)
        staging = 0 if kept else most_staging_bytes(_device_cache(spec))
        kept["kvCache.store"] = address.segment + address.buffer + staging
    return kept


def _on_device(spec: InferenceServiceSpec) -> dict[str, int]:
    """Host memory of the KV cache: on CPUs it is in the same memory."""
    size = _device_cache(spec) if spec.accelerators.type == "cpu" else None
    return {"engine.kvMemory": size} if size is not None else {}


def _device_cache(spec: InferenceServiceSpec) -> int | None:
    """Bytes of each rank; None if the engine decides."""
    return parse_quantity(spec.engine.kv_memory) if spec.engine.kv_memory is not None else None


def memory_limit(limits: dict[str, Any]) -> int | None:
    """Returns the memory of `resources.limits`, or None. Raises ValueError for what is no size."""
    return parse_quantity(str(limits["memory"])) if "memory" in limits else None
