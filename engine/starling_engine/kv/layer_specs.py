"""The KV specs and groups of a model's layers. Imports no torch, so that memory can be planned without it."""

from starling_engine.config import CACHE_GROUP, WorkerConfig
from starling_engine.kv.spec import KVGroup, KVSpec, LatentSpec, WindowSpec, group_layers
from starling_engine.model_config.config import ModelConfig
from starling_engine.topology.shard import ALL, Shard

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1, "uint8": 1}


def kv_groups(model: ModelConfig, config: WorkerConfig) -> list[KVGroup]:
    """Returns the groups of all layers, each with the layers of this rank: block tables are the same on every rank."""
    at, layout = config.layout.coordinates(config.rank), config.layout
    local = stage_layers(model, Shard(at.pp, layout.pipeline))
    groups = whole_groups(model, config, Shard(at.tp, layout.tensor))
    return [KVGroup(group.spec, tuple(i for i in group.layers if i in local)) for group in groups]


def whole_groups(model: ModelConfig, config: WorkerConfig, tensor: Shard = ALL) -> list[KVGroup]:
    """Returns the groups with the layers of all stages, for the heads of `tensor`."""
    return group_layers(kv_specs(model, config.block_size, config.kv_dtype, tensor))


def stage_layers(model: ModelConfig, stage: Shard) -> range:
    """Returns the layers of a pipeline stage."""
    share = stage.balanced(model.num_layers)
    return range(share.start, share.start + share.size)


def kv_specs(config: ModelConfig, block_size: int, kv_dtype: str, tensor: Shard = ALL) -> list[KVSpec]:
    """Returns each layer's spec, for the heads of `tensor`. `block_size` is in tokens, `kv_dtype` a key of DTYPE_BYTES."""
    heads = tensor.heads(config.num_kv_heads).size
    return [_spec(config, heads, window, block_size, kv_dtype) for window in config.windows]


def _spec(config: ModelConfig, heads: int, window: int, block_size: int, kv_dtype: str) -> KVSpec:
    dtype_bytes, row_size = DTYPE_BYTES[kv_dtype], _row_size(config.head_dim, kv_dtype)
    if config.mla:  # one latent for all heads, the same on every rank
        return LatentSpec(block_size, 1, config.mla.latent_dim, dtype_bytes)
    if window:
        return WindowSpec(block_size, heads, row_size, dtype_bytes, window)
    return KVSpec(block_size, heads, row_size, dtype_bytes)


def _row_size(head_dim: int, kv_dtype: str) -> int:
    """Returns the elements of a row: codes of 8 or 4 bits come with a scale, and those of 4 with a minimum, for each 32 columns."""
    match kv_dtype:
        case "int8":
            return head_dim + head_dim // CACHE_GROUP * 2
        case "uint8":
            return head_dim // 2 + head_dim // CACHE_GROUP * 4
    return head_dim
