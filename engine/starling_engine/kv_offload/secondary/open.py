"""Opens the tiers that outlive the engine, as a rank's configuration names them."""

from starling_engine.config import TiersConfig, WorkerConfig
from starling_engine.kv.layer_specs import whole_groups
from starling_engine.kv_offload.secondary.base import CHUNK, SecondaryTier
from starling_engine.kv_offload.secondary.fingerprint import fingerprint_of
from starling_engine.kv_offload.secondary.parts import covers, part_of
from starling_engine.kv_offload.secondary.share import GroupShare, SecondaryTiers
from starling_engine.model_config.config import ModelConfig
from starling_engine.topology.shard import Shard


def open_outside(tiers: TiersConfig, model: ModelConfig, config: WorkerConfig) -> SecondaryTiers | None:
    """The folder first, which is nearer, then the store; None where there is neither. Raises ConfigError."""
    opened: list[SecondaryTier] = []
    if tiers.far:
        # Of an fp8 cache also what it was rounded from: that decides which way.
        dtype = f"{config.kv_dtype} of {config.dtype}" if config.fp8_cache else config.dtype
        mark = fingerprint_of(config.model_path, config.load_format, config.seed, dtype)
        if tiers.fs_path is not None:
            from starling_engine.kv_offload.secondary.folder import open_folder

            opened.append(open_folder(tiers.fs_path, tiers.fs_bytes, tiers.fs_direct, mark))
        if tiers.store is not None:
            from starling_engine.kv_offload.secondary.store.tier import open_store

            opened.append(open_store(tiers.store, mark.digest))
    return SecondaryTiers(opened, group_shares(model, config)) if opened else None


def group_shares(model: ModelConfig, config: WorkerConfig) -> list[GroupShare]:
    """What one rank holds of each KV group's chunks, in the layout of objects."""
    place, layout = config.layout.coordinates(config.rank), config.layout
    tensor, stage = Shard(place.tp, layout.tensor), Shard(place.pp, layout.pipeline)
    groups = whole_groups(model, config)
    planes = 1 if model.mla else 2
    shares = []
    for group in groups:
        row = group.spec.page_bytes // (planes * group.spec.num_kv_heads * config.block_size)
        own = part_of(model, group, tensor, stage)
        writes = all(part_of(model, group, Shard(lower, layout.tensor), stage) != own for lower in range(place.tp))
        window = -(-group.spec.window // CHUNK) + 1 if group.spec.window else 0  # it may begin within a chunk
        shares.append(GroupShare(covers(model, group, tensor, stage), planes, row * CHUNK, writes, window))
    return shares
