"""What each layer of a model keeps in the paged cache. Imports no torch, so that memory can be planned without it."""

from starling_engine.config import WorkerConfig
from starling_engine.kv.spec import KVGroup, KVSpec, LatentSpec, WindowSpec, group_layers
from starling_engine.model_config.config import ModelConfig
from starling_engine.topology.shard import ALL, Shard

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


def kv_groups(model: ModelConfig, config: WorkerConfig) -> list[KVGroup]:
    """The groups of all layers, so that block tables are the same on every rank; in each, the layers that this rank holds."""
    place, layout = config.layout.coordinates(config.rank), config.layout
    own = stage_layers(model, Shard(place.pp, layout.pipeline))
    groups = whole_groups(model, config, Shard(place.tp, layout.tensor))
    return [KVGroup(group.spec, tuple(i for i in group.layers if i in own)) for group in groups]


def whole_groups(model: ModelConfig, config: WorkerConfig, tensor: Shard = ALL) -> list[KVGroup]:
    """The groups with the layers of all stages, of the heads that `tensor` holds."""
    return group_layers(kv_specs(model, config.block_size, DTYPE_BYTES[config.kv_dtype], tensor))


def stage_layers(model: ModelConfig, stage: Shard) -> range:
    """The layers of one pipeline stage."""
    share = stage.balanced(model.num_layers)
    return range(share.start, share.start + share.size)


def kv_specs(config: ModelConfig, block_size: int, dtype_bytes: int, tensor: Shard = ALL) -> list[KVSpec]:
    """One spec a layer, in order, of the heads that `tensor` holds. `block_size` in tokens, `dtype_bytes` of one cached element."""
    heads = tensor.heads(config.num_kv_heads).size
    return [_spec(config, heads, window, block_size, dtype_bytes) for window in config.windows]


def _spec(config: ModelConfig, heads: int, window: int, block_size: int, dtype_bytes: int) -> KVSpec:
    if config.mla:  # one latent for all heads, and so on every rank
        return LatentSpec(block_size, 1, config.mla.latent_dim, dtype_bytes)
    if window:
        return WindowSpec(block_size, heads, config.head_dim, dtype_bytes, window)
    return KVSpec(block_size, heads, config.head_dim, dtype_bytes)
