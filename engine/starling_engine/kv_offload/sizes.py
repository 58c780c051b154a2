"""Sizes of a rank's host memory for chunks. Pure: the scheduler and every rank come to the same numbers, without torch."""

from dataclasses import replace

from starling_engine.byte_sizes import format_bytes
from starling_engine.config import TiersConfig, WorkerConfig, most_staging_bytes
from starling_engine.errors import ConfigError
from starling_engine.kv.layer_specs import kv_groups, state_group, whole_groups
from starling_engine.kv.spec import pieces_of, slab_bytes
from starling_engine.kv_offload.secondary.base import CHUNK
from starling_engine.kv_offload.secondary.store.address import parse_address
from starling_engine.ledger import HostMemory
from starling_engine.model_config.config import ModelConfig


def chunk_bytes(model: ModelConfig, config: WorkerConfig) -> int:
    """Returns the bytes of a slot: one KV group's share of CHUNK tokens, on the rank that holds most of it.

    As many blocks of a state fit, for a block of it is a whole slab. Where there is a state alone, its largest piece fits.
    """
    ranks = [replace(config, rank=rank) for rank in range(config.layout.world_size)]
    blocks = CHUNK // config.block_size if model.attends else max(state_pieces(model, config))
    return max(rank_slab_bytes(model, rank) for rank in ranks) * blocks


def rank_slab_bytes(model: ModelConfig, config: WorkerConfig) -> int:
    """Returns the bytes of a block on this rank."""
    groups, state = kv_groups(model, config), state_group(model, config)
    return slab_bytes(groups) if state is None else slab_bytes(groups, state.spec, len(state.layers))


def state_pieces(model: ModelConfig, config: WorkerConfig) -> list[int]:
    """Returns the blocks of each piece of a snapshot, which are the same on every rank; none without a recurrent state."""
    state = state_group(model, config)
    return pieces_of(state, CHUNK // state.block_size) if state is not None else []


def host_slots(model: ModelConfig, config: WorkerConfig) -> int:
    """Returns the slots of every rank's CPU tier, or of the staging buffer in its place.

    Raises ConfigError when not even one request's last chunks would fit.
    """
    assert config.tiers is not None
    size = chunk_bytes(model, config)
    least, slots = _least_slots(model, config), config.tiers.host_bytes // size
    if slots < least:
        what = f"{CHUNK} tokens and their state" if model.has_state else f"{CHUNK} tokens"
        raise ConfigError(
            f"{format_bytes(config.tiers.host_bytes)} do not hold {what}; set it to at least {least * size}", "kv_cpu_bytes"
        )
    return slots


def _least_slots(model: ModelConfig, config: WorkerConfig) -> int:
    """Returns the slots that a prefix of CHUNK tokens takes; with a snapshot, beside the quarter that write-back may hold."""
    groups, pieces = len(whole_groups(model, config)), len(state_pieces(model, config))
    return -(-4 * (groups + pieces + 1) // 3) + 1 if pieces else groups


def host_memory(tiers: TiersConfig | None) -> HostMemory:
    """Returns what one rank's tiers take. Raises ConfigError for a store's URL that cannot be one."""
    if tiers is None:
        return HostMemory()
    address = parse_address(tiers.store) if tiers.store is not None else None
    return HostMemory(
        cpu=tiers.cpu_bytes,
        staging=tiers.staging_bytes,
        store=address.segment + address.buffer if address is not None else 0,
        staged_for="kv_fs_path" if tiers.fs_path is not None else "kv_store",
    )


def staging_bytes(model: ModelConfig, config: WorkerConfig) -> int:
    """Returns the bytes of the staging buffer where there is no CPU tier: those of the longest request, up to 1 GiB.

    Of a state, a request has snapshots of its prompt and of its output.
    """
    groups, snapshots = len(whole_groups(model, config)), 2 * len(state_pieces(model, config))
    size = chunk_bytes(model, config)
    longest = (-(-config.max_model_len // CHUNK) * groups + snapshots) * size
    return max(_least_slots(model, config) * size, min(longest, most_staging_bytes(config.kv_cache_memory_bytes)))
