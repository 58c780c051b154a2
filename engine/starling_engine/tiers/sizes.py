"""How many chunks fit into the host memory of a rank. Pure: the scheduler and every rank come to the same number."""

from dataclasses import replace

from starling_engine.config import WorkerConfig
from starling_engine.errors import ConfigError
from starling_engine.ledger import amount, block_bytes
from starling_engine.models.config import ModelConfig
from starling_engine.models.kv import kv_groups, whole_groups
from starling_engine.tiers.far import CHUNK
from starling_engine.tiers.passage import most_passage


def chunk_bytes(model: ModelConfig, config: WorkerConfig) -> int:
    """Bytes of a slot: of one KV group's share of CHUNK tokens, on the rank that holds most of it."""
    ranks = range(config.layout.world_size)
    return max(block_bytes(kv_groups(model, replace(config, rank=rank))) for rank in ranks) * (CHUNK // config.block_size)


def host_slots(model: ModelConfig, config: WorkerConfig) -> int:
    """Slots of every rank's CPU tier. Raises ConfigError when not even one request's last chunks would fit."""
    assert config.tiers is not None
    size = chunk_bytes(model, config)
    groups = len(whole_groups(model, config))
    slots = config.tiers.cpu_bytes // size
    if slots < groups:
        raise ConfigError(
            f"{amount(config.tiers.cpu_bytes)} do not hold {CHUNK} tokens; set it to at least {groups * size}", "kv_cpu_bytes"
        )
    return slots


def passage_bytes(model: ModelConfig, config: WorkerConfig) -> int:
    """Host memory that tiers outside need to pass through, where there is no CPU tier: that of the longest request that the device
    can hold, up to 1 GiB.
    """
    groups = len(whole_groups(model, config))
    size = chunk_bytes(model, config)
    longest = -(-config.max_model_len // CHUNK) * groups * size
    return max(groups * size, min(longest, most_passage(config.kv_cache_memory_bytes)))
