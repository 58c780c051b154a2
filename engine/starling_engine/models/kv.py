"""What each layer of a model keeps in the paged cache. Imports no torch, so that memory can be planned without it."""

from starling_engine.kv.spec import KVSpec, LatentSpec, WindowSpec
from starling_engine.models.config import ModelConfig


def kv_specs(config: ModelConfig, block_size: int, dtype_bytes: int) -> list[KVSpec]:
    """One spec a layer, in order. `block_size` in tokens, `dtype_bytes` of one cached element."""
    return [_spec(config, window, block_size, dtype_bytes) for window in config.windows]


def _spec(config: ModelConfig, window: int, block_size: int, dtype_bytes: int) -> KVSpec:
    if config.mla:
        return LatentSpec(block_size, 1, config.mla.latent_dim, dtype_bytes)
    if window:
        return WindowSpec(block_size, config.num_kv_heads, config.head_dim, dtype_bytes, window)
    return KVSpec(block_size, config.num_kv_heads, config.head_dim, dtype_bytes)
