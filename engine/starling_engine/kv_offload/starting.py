"""A rank's tiers of the KV cache, made from its configuration."""

from collections.abc import Callable, Sequence

import torch

from starling_engine.config import WorkerConfig
from starling_engine.kv.spec import KVGroup
from starling_engine.kv_offload.arena import Arena
from starling_engine.kv_offload.copies import group_pages
from starling_engine.kv_offload.orders import TierStatus, TransferDone
from starling_engine.kv_offload.secondary.open import open_outside
from starling_engine.kv_offload.sizes import chunk_bytes, host_slots
from starling_engine.kv_offload.transfers import TransferThreads
from starling_engine.model_config.config import ModelConfig


def open_tiers(
    config: WorkerConfig,
    model: ModelConfig,
    groups: Sequence[KVGroup],
    kv: Sequence[torch.Tensor],
    answer: Callable[[TransferDone | TierStatus], None],
) -> TransferThreads | None:
    """None where the configuration has none. `kv` has the pages of the layers that are here. Raises ConfigError."""
    if config.tiers is None:
        return None
    apart = bool(kv) and kv[0].device.type != "cpu"
    arena = Arena(host_slots(model, config), chunk_bytes(model, config), pinned=apart)
    outside = open_outside(config.tiers, model, config)
    return TransferThreads(group_pages(groups, kv), arena, outside, answer, processors=0 if apart else config.num_threads)
