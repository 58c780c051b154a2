"""The heads of layers that attend, read from a config: their numbers and sizes, latents, and rotary embeddings."""

from dataclasses import dataclass

from starling_engine.errors import ModelError
from starling_engine.model_config.compressed import CompressedShape
from starling_engine.model_config.definition import ModelDefinition
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig
from starling_engine.model_config.mla_shape import MlaShape
from starling_engine.model_config.rope import LongRopeScaling, RopeConfig

MAX_WIDTH = 1 << 20
"""More elements than any model has in a hidden state or all heads. A config with more is damaged.

Norms and rotations of these sizes are made before a checkpoint's tensors are compared with it.
"""


@dataclass(frozen=True, kw_only=True)
class AttentionHeads:
    """Layers that attend, as a config describes them: numbers of heads, their dimension, latents, and rotary embeddings."""

    count: int = 0
    kv_count: int = 0
    dim: int = 0
    mla: MlaShape | None = None
    compressed: CompressedShape | None = None
    ropes: tuple[RopeConfig, ...] = ()


NO_HEADS = AttentionHeads()


def read_attention(config: Fields, definition: ModelDefinition) -> AttentionHeads:
    """Reads the heads of a config whose layers attend.

    Raises ModelError naming the field, UnsupportedModel for a rotation that is not known.
    """
    count, kv_count = _read_heads(config, definition)
    compressed = definition.compressed(config, count)
    mla, ropes = definition.mla(config, count), definition.ropes(config, definition.rope_theta)
    dim = mla.key_dim if mla else _read_head_dim(config, count, definition)
    _check_ropes(config, ropes, mla.rope_dim if mla else dim)
    kv_count = kv_count if compressed is None else 1
    return AttentionHeads(count=count, kv_count=kv_count, dim=dim, mla=mla, compressed=compressed, ropes=ropes)


def _read_heads(config: Fields, definition: ModelDefinition) -> tuple[int, int]:
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = definition.kv_heads(config, num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{config.source}: num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})"
        )
    return num_heads, num_kv_heads


def _read_head_dim(config: Fields, num_heads: int, definition: ModelDefinition) -> int:
    if config.has("head_dim") or definition.head_dim:
        head_dim = config.integer("head_dim", definition.head_dim, high=MAX_WIDTH)
    else:
        hidden_size = config.integer("hidden_size", high=MAX_WIDTH)
        if hidden_size % num_heads:
            raise ModelError(
                f"{config.source}: hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({num_heads}) "
                "when there is no head_dim"
            )
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise ModelError(f"{config.source}: head_dim must be even to be rotated, got {head_dim}")
    if num_heads * head_dim > MAX_WIDTH:
        raise config.error("num_attention_heads", f"times head_dim ({head_dim}) must be at most {MAX_WIDTH}")
    return head_dim


def check_own_heads(config: Fields, num_heads: int, layer: LayerConfig) -> None:
    """Raises ModelError for a layer whose own heads are not possible."""
    own = layer.kv_heads
    if own is not None and (num_heads % own.count or own.dim % 2 or num_heads * own.dim > MAX_WIDTH):
        rule = f"an even size, at most {MAX_WIDTH} / {num_heads}, and a number that divides {num_heads}"
        raise ModelError(f"{config.source}: heads of a layer must have {rule}, got {own.dim} and {own.count}")


def _check_ropes(config: Fields, ropes: tuple[RopeConfig, ...], head_dim: int) -> None:
    """Raises ModelError for heads that the rotary embeddings do not fit."""
    for rope in ropes:
        rotary_dim = rope.rotary_dim(head_dim)
        if rotary_dim < 2 or rotary_dim % 2:
            raise ModelError(
                f"{config.source}: partial_rotary_factor must leave an even number of a head's {head_dim} elements to be rotated, "
                f"got {rotary_dim}"
            )
        if isinstance(rope.scaling, LongRopeScaling):
            for name, factors in (("short_factor", rope.scaling.short), ("long_factor", rope.scaling.long)):
                if len(factors) != rotary_dim // 2:
                    raise ModelError(f"{config.source}: {name} must have {rotary_dim // 2} numbers, got {len(factors)}")
